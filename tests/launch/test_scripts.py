"""The scripts in launch/: torchrun is run here, Slurm by .ci/slurm; the Kubernetes manifest composes."""

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from clipscale.cli.compose import compose_settings
from clipscale.cli.words import overrides_of
from clipscale.config.presets import PACKAGE
from clipscale.run_folder.records import read_metrics
from tests.conftest import TINY
from tests.support.slurm import need_two_nodes, state

LAUNCH = PACKAGE.parent / "launch"
LONG = [*(word for word in TINY if not word.startswith("samples")), "run=long", "samples=2400"]  # 150 steps


def steps(run: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run / "metrics.jsonl")]


def test_the_kubernetes_manifest_starts_a_run_that_composes() -> None:
    trainer = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())["spec"]["trainer"]
    assert trainer["command"][-3:] == ["-m", "clipscale", "train"]
    config = compose_settings("train", overrides_of("train", trainer["args"])[1])
    assert config.batch % (trainer["numNodes"] * trainer["numProcPerNode"]) == 0


# What a TrainJob may change of a pod and of a container: PodSpecPatch and ContainerPatch of Kubeflow Trainer 2's API.
POD = {
    "serviceAccountName", "volumes", "initContainers", "containers", "imagePullSecrets", "securityContext",
    "nodeSelector", "affinity", "tolerations", "schedulingGates",
}  # fmt: skip
CONTAINER = {"name", "env", "volumeMounts", "securityContext"}


def test_the_kubernetes_manifest_asks_for_what_kubernetes_takes_and_its_user_can_write() -> None:
    spec = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())["spec"]
    (jobs,) = (patch["trainingRuntimeSpec"]["template"]["spec"] for patch in spec["runtimePatches"])
    (pod,) = (job["template"]["spec"]["template"]["spec"] for job in jobs["replicatedJobs"])
    assert pod.keys() <= POD and pod["containers"][0].keys() <= CONTAINER
    docker = (LAUNCH.parent / "docker/Dockerfile").read_text()
    (uid,) = re.findall(r"useradd --uid (\d+)", docker)
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"] == int(uid)
    assert "." in spec["trainer"]["image"].partition("/")[0], "a name without a registry is docker.io's"


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_any_user_of_the_image_can_write_its_runs(name: str) -> None:
    """The user writes into the image's folder, which a new volume copies, or one that was made before docker does."""
    usage, _, build = (LAUNCH.parent / "docker" / name).read_text().partition("\nFROM ")
    made = usage.find("#   mkdir -p runs\n")
    runs = usage.find("#   docker run ")
    assert 0 < made < runs and '--user "$(id -u):$(id -g)"' in usage[runs:]
    (volume,) = re.findall(r'-v "\$PWD/runs:(\S+)"', usage)
    folders = build.partition("install --directory --mode=1777 ")[2].partition("\n")[0].split()
    assert volume in folders
    assert build.index("install --directory") < build.index("\nUSER "), "root makes them"


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "status"), [("", 0), ("lr=1", 2)])
def test_torchrun_trains_on_two_processes_and_a_wrong_setting_is_one_line(
    environment: dict, shards: str, tmp_path: Path, wrong: str, status: int
) -> None:
    words = [*TINY, f"data.train={shards}", "run=a", *wrong.split()]
    variables = environment | {"PROCS": "2", "RESTARTS": "0", "CUDA_VISIBLE_DEVICES": ""}
    script = str(LAUNCH / "torchrun.sh")
    done = subprocess.run([script, *words], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == status, done.stderr
    if wrong:
        assert done.stderr == "error: unknown key 'lr'; did you mean 'optim.lr'?\n"
    else:
        assert done.stdout.count("done: runs/a (step 2") == 1
        assert json.loads((tmp_path / "runs/a/env.json").read_text())["processes"] == 2


# ---- Slurm: a controller with two nodes, which .ci/slurm starts ----


@pytest.mark.slurm
@pytest.mark.timeout(900)
def test_a_slurm_job_asked_to_stop_saves_goes_back_into_the_queue_and_ends_the_run(
    environment: dict, shards: str, tmp_path: Path
) -> None:
    need_two_nodes()
    log = tmp_path / "job.log"
    run = tmp_path / "runs/long"
    options = ["--parsable", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1"]
    command = ["sbatch", *options, f"--output={log}", str(LAUNCH / "slurm.sh"), *LONG, f"data.train={shards}"]
    submitted = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()

    def wait_for(what: Callable[[], bool], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, (state(job), log.read_text() if log.exists() else "no log")
            time.sleep(0.3)

    wait_for(lambda: len(steps(run)) > 2)
    subprocess.run(["scancel", "--signal=TERM", job], check=True)
    wait_for(lambda: "stopped by SIGTERM after step" in log.read_text())
    stopped = len(steps(run))
    assert stopped < 150, "the run must be stopped before its end for this to test anything"
    wait_for(lambda: state(job) == "PENDING")
    # Slurm lets it rest for two minutes; at once, its nodes would still refuse it
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now+5"], check=True)
    wait_for(lambda: state(job) in ("COMPLETED", "FAILED"))
    assert state(job) == "COMPLETED", log.read_text()
    assert steps(run) == list(range(1, 151)), (stopped, log.read_text())
    assert json.loads((run / "env.json").read_text())["processes"] == 2
