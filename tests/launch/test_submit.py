"""One description becomes a Slurm script, a Kubernetes manifest or torchrun's command line; --dry-run prints exactly what would run."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from clipscale.cli.main import main
from clipscale.common.errors import UserError
from clipscale.config.presets import PACKAGE
from clipscale.config.sections import JobConfig, LaunchConfig
from clipscale.config.train import TrainConfig
from clipscale.launch.submit import launch

PROCESSES = ("launch.procs=8", "job.nodes=3")
RUN = ("model=tiny", "batch=1M", "data.train=/data/{00..99}.tar", "run=/storage/runs/it's", *PROCESSES)
CONTAINER = ("job.image=ours:1", "job.mounts=[claim:/storage,/scratch:/data]")
POD = {"scheduler": "kubernetes", "image": "x", "mounts": ["claim:/storage"]}

Dry = Any


@pytest.fixture
def dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dry:
    """`dry(words)`: what `clipscale launch --dry-run` prints on stdout, or its error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", None)  # nothing is submitted

    def run(*words: str, status: int = 0) -> str:
        assert main(["launch", "--dry-run", *words]) == status
        printed = capsys.readouterr()
        return printed.err if status else printed.out

    return run


def test_a_slurm_script_has_the_description_and_the_same_words(dry: Dry, tmp_path: Path) -> None:
    settings = ["job.hours=1.5", "job.cpus=12", "job.memory=512G", "job.options.partition=gpu", "launch.grace_s=200"]
    text = dry("launch=slurm", *RUN, *settings, "job.options.requeue=false", "job.env=[A=b c]")
    lines = text.splitlines()
    options = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH ")}
    wanted = (
        "nodes=3 ntasks-per-node=8 gpus-per-node=8 cpus-per-task=12 mem=524288M time=90 signal=TERM@260 partition=gpu"
    )
    assert options >= {*wanted.split()}
    assert not any("requeue" in option for option in options)
    assert "export A='b c'" in lines
    # bash reads the words that were given, and a task gets all cores that the job asked for
    for name, body in (("srun", 'printf "%s\\n" "$@"'), ("scontrol", "echo a")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    for cores in ({"SLURM_CPUS_PER_TASK": "12"}, {}):
        environment = job | cores | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        with subprocess.Popen(["bash"], stdin=-1, stdout=-1, text=True, env=environment) as bash:
            words = bash.communicate(text)[0].splitlines()
        assert words[0] == ("--cpus-per-task=12" if cores else "--kill-on-bad-exit=0")
        assert words[words.index("train") + 1 :] == [*RUN[:3], "launch.grace_s=200", RUN[3], "job.scheduler=local"]


def test_a_manifest_has_the_description(capsys: pytest.CaptureFixture[str]) -> None:
    made = {}
    for kind in ("TrainJob", "PyTorchJob"):
        job = JobConfig(**{**POD, "nodes": 2, "cpus": 4, "hours": 1, "env": ["A=1"], "options": {"kind": kind}})
        config = TrainConfig(run="/storage/run", launch=LaunchConfig(procs=8), job=job)
        assert launch(config, ["batch=1M"], named=True, dry_run=True) == 0
        made[kind] = yaml.safe_load(capsys.readouterr().out)["spec"]
    old, new = made["PyTorchJob"], made["TrainJob"]
    pod = old["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert (
        pod["command"]
        == new["trainer"]["command"]
        == ["python", "-m", "clipscale.launch.torchrun", "--max-restarts=0"]
        + ["-m", "clipscale", "train", "batch=1M", "run=/storage/run", "job.scheduler=local"]
    )
    assert pod["env"] == new["trainer"]["env"] == [{"name": "A", "value": "1"}]
    assert pod["resources"] == new["trainer"]["resourcesPerNode"]
    assert new["activeDeadlineSeconds"] == old["runPolicy"]["activeDeadlineSeconds"] == 3600


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["TrainJob", "PyTorchJob"])
def test_a_manifest_is_valid_by_the_published_schema(dry: Dry, kind: str) -> None:
    words = ["job.hours=2", "job.cpus=4", "job.memory=64G", "job.env=[A=1,TOKEN]"]
    words += ["job.options.env_from=keys", "job.options.queue=q"]
    made = yaml.safe_load(dry("launch=kubernetes", f"job.options.kind={kind}", *RUN, *CONTAINER, *words))
    if kind == "TrainJob":
        models = pytest.importorskip("kubeflow_trainer_api.models")
        assert models.TrainerV1alpha1TrainJob.from_dict(made).to_dict() == made  # an unknown field would be lost
        trainer = made["spec"]["trainer"]
        assert (trainer["numNodes"], trainer["numProcPerNode"]) == (3, 8)
    else:
        models = pytest.importorskip("kubeflow.training.models")
        check_fields(models, models.KubeflowOrgV1PyTorchJob, made)
        replicas = made["spec"]["pytorchReplicaSpecs"]
        assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 2}
        assert made["spec"]["nprocPerNode"] == "8"
        trainer = replicas["Worker"]["template"]["spec"]["containers"][0]
    assert trainer["image"] == "ours:1"
    assert trainer["command"][4:7] == ["-m", "clipscale", "train"] and RUN[3] in trainer["command"]
    assert trainer["env"][1]["valueFrom"]["secretKeyRef"] == {"name": "keys", "key": "TOKEN"}
    assert made["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "q"}
    resources = trainer["resourcesPerNode" if kind == "TrainJob" else "resources"]
    assert resources["limits"] == {"cpu": "32", "memory": "65536Mi", "nvidia.com/gpu": "8"}
    text = yaml.safe_dump(made)
    assert "claimName: claim" in text and "path: /scratch" in text and "mountPath: /dev/shm" in text


def check_fields(models: Any, model: Any, value: dict[str, Any]) -> None:
    """Every field is one of the schema's, with a value of its type, down to the types of Kubernetes itself."""
    import kubernetes.client.models as core

    names = {given: (field, model.openapi_types[field]) for field, given in model.attribute_map.items()}
    for given, item in value.items():
        assert given in names, f"{model.__name__} has no field {given}"
        kind = names[given][1]
        inner = kind.removeprefix("list[").removeprefix("dict(str, ").rstrip("])")
        parts = item if kind.startswith("list[") else item.values() if kind.startswith("dict(") else [item]
        for part in parts:
            found = getattr(models, inner, None) or getattr(core, inner, None)
            if found is not None and hasattr(found, "openapi_types"):
                check_fields(models, found, part)
            elif inner in ("str", "int", "bool"):
                assert type(part).__name__ == inner, (given, part)


def test_torchrun_has_the_same_line_on_every_machine(dry: Dry) -> None:
    words = shlex.split(dry("launch=torchrun", "job.head=a:29500", *RUN))
    assert words[1:9] == [
        "-m", "clipscale.launch.torchrun", "--max-restarts=0", "--nnodes=3", "--nproc-per-node=8",
        "--rdzv-backend=c10d", "--rdzv-endpoint=a:29500", "--rdzv-id=it-s",
    ]  # fmt: skip
    assert words[9:] == ["-m", "clipscale", "train", *RUN[:4], "job.scheduler=local"]
    unnamed = dry("launch=torchrun", "job.head=a:29500", *(word for word in RUN if not word.startswith("run=")))
    assert "run=" not in unnamed and "--rdzv-id=clipscale" in unnamed


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"scheduler": "slurm", "mounts": ["x"]}, "job.mounts=x: give SOURCE:TARGET"),
        ({"scheduler": "slurm", "env": ["NOT_SET_HERE"]}, "job.env=NOT_SET_HERE: the environment variable is not set"),
        (
            {"scheduler": "slurm", "env": ["MY_TOKEN=abcdefgh"]},
            "MY_TOKEN holds a secret, which everybody could read in the queue",
        ),
        ({"scheduler": "torchrun", "nodes": 2}, "job.head is not set; give HOST:PORT"),
        ({"scheduler": "torchrun", "options": {"x": 1}}, "job.options.x: not an option of launch=torchrun"),
        ({"scheduler": "kubernetes"}, "job.image is not set; give the image"),
        ({"scheduler": "kubernetes", "image": "x"}, "run=/storage/run would be lost with its pod; mount storage"),
        ({**POD, "options": {"kind": "Job"}}, "job.options.kind=Job: choose TrainJob or PyTorchJob"),
        ({**POD, "env": ["KEY"]}, "job.env=KEY: give job.options.env_from=NAME"),
    ],
)
def test_a_mistake_is_named(job: dict[str, Any], message: str) -> None:
    config = TrainConfig(run="/storage/run", launch=LaunchConfig(procs=8), job=JobConfig(**job))
    with pytest.raises(UserError) as error:
        launch(config, [], named=True, dry_run=True)
    assert str(error.value).startswith(message)


def test_mistakes_on_the_command_line(dry: Dry) -> None:
    assert "launch.procs is not set; give the processes" in dry("launch=slurm", *RUN, "launch.procs=null", status=2)
    error = dry("launch=slurm", *RUN, "data.train=https://h/a.tar?sig=x", status=2)
    assert error.startswith("error: data.train holds a secret, which everybody could read in the queue"), error


def test_train_submits_what_the_dry_run_prints(
    dry: Dry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = dry("launch=slurm", *RUN)
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ncat > {tmp_path}/given\necho 12")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "launch=slurm", *RUN]) == 0
    assert (tmp_path / "given").read_text() == script
    assert capsys.readouterr().out.startswith("job 12: run=/storage/runs/it's")


def test_an_experiment_that_chooses_slurm_is_trained_inside_the_job(dry: Dry, tmp_path: Path) -> None:
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text("# @package _global_\njob: {scheduler: slurm}\n")
    words = ("--config-dir", str(tmp_path / "conf"), "experiment=mine", *RUN)
    text = dry(*words)
    assert "experiment=mine" in text
    (line,) = [line for line in text.splitlines() if 'exec "$@"' in line]
    assert line.endswith("job.scheduler=local"), text


def test_the_standalone_script_is_the_rendered_one(dry: Dry) -> None:
    """launch/slurm.sh needs no installed clipscale on the login node; what it does is the same."""

    def body(text: str) -> str:
        return text[text.index("set -uo pipefail") :].partition("exec")[0].replace(" \n", "\n")

    assert body(dry("launch=slurm", *RUN)) == body((PACKAGE.parent / "launch/slurm.sh").read_text())
