"""launch/slurm.sh and launch=slurm on a real Slurm with two nodes or more, whose names resolve.

One host can play several (NodeHostname=localhost and a Port for each node), with their names in /etc/hosts.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clipscale.config.presets import PACKAGE
from tests.conftest import TINY, Command


def nodes() -> int:
    """Nodes that would take a job."""
    if shutil.which("sinfo") is None:
        return 0
    done = subprocess.run(["sinfo", "-h", "-t", "idle,mix", "-o", "%D"], capture_output=True, text=True)
    return sum(map(int, done.stdout.split()))


pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(900),
    pytest.mark.skipif("nodes() < 2", reason="needs a Slurm controller with two idle nodes"),
]
Submit = Callable[..., str]


@pytest.fixture
def submit(tmp_path: Path, environment: dict[str, str]) -> Submit:
    """`submit(words)`: the job's number; one task on each of two nodes, no GPUs."""

    def run(*words: str) -> str:
        options = ["--parsable", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1"]
        script = str(PACKAGE.parent / "launch/slurm.sh")
        done = subprocess.run(
            ["sbatch", *options, f"--output={tmp_path}/job.log", script, *words],
            cwd=tmp_path,
            env=environment | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def state(job: str) -> str:
    done = subprocess.run(["scontrol", "show", "job", job, "-o"], capture_output=True, text=True)
    return next(word.partition("=")[2] for word in done.stdout.split() if word.startswith("JobState="))


def wait_for(job: str, what: Callable[[], bool], log: Path, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, (state(job), log.read_text() if log.exists() else "no log")
        time.sleep(0.3)


def steps(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_job_asked_to_stop_saves_goes_back_into_the_queue_and_ends_the_run(
    submit: Submit, shards: str, tmp_path: Path
) -> None:
    log, run = tmp_path / "job.log", tmp_path / "runs/long"
    words = [word for word in TINY if not word.startswith("samples")]
    job = submit(*words, f"data.train={shards}", "run=long", "samples=2400")  # 150 steps
    wait_for(job, lambda: len(steps(run)) > 2, log)
    subprocess.run(["scancel", "--signal=TERM", job], check=True)
    wait_for(job, lambda: "stopped by a signal after step" in log.read_text(), log)
    stopped = len(steps(run))
    assert stopped < 150, "the run must be stopped before its end for this to test anything"
    wait_for(job, lambda: state(job) == "PENDING", log)
    # Slurm lets it rest for two minutes; at once, its nodes would still refuse it
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now+5"], check=True)
    wait_for(job, lambda: state(job) in ("COMPLETED", "FAILED"), log)
    printed = log.read_text()
    assert state(job) == "COMPLETED", printed
    assert steps(run) == list(range(1, 151)), (stopped, printed)
    assert printed.count("done: runs/long (step 150") == 1, printed
    assert json.loads((run / "env.json").read_text())["processes"] == 2


@pytest.fixture
def high() -> str:
    """A partition whose jobs preempt those of the default one, which requeues them."""
    done = subprocess.run(["sinfo", "-h", "-o", "%R %p"], capture_output=True, text=True)
    priorities = {name.split()[0]: int(name.split()[1]) for name in done.stdout.splitlines()}
    preempts = (
        "PreemptMode             = REQUEUE"
        in subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True).stdout
    )
    if not preempts or len(priorities) < 2:
        pytest.skip("needs PreemptMode=REQUEUE and a second partition of a higher priority")
    return max(priorities, key=lambda name: priorities[name])


def test_launch_slurm_is_preempted_requeued_and_finished(
    command: Command, shards: str, tmp_path: Path, high: str
) -> None:
    """The run is not named: it is when it is submitted. Its curve is that of a run which nothing has disturbed, to rounding."""
    words = [word for word in TINY if not word.startswith("samples")]
    words += [f"data.train={shards}", "samples=480", "checkpoint.every=10", "launch.threads=1"]  # 30 steps
    place = ["launch=slurm", "launch.procs=1", "job.nodes=2", "job.cpus=1", "job.hours=1", "launch.grace_s=20"]
    done = command("train", *place, *words)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[1].rstrip(":")
    run = tmp_path / done.stdout.split("run=")[1].split(";")[0]
    (log,) = [tmp_path / f"{run.name}-{job}.log"]
    wait_for(job, lambda: len(steps(run)) > 2, log)
    urgent = subprocess.run(
        ["sbatch", "--parsable", f"--partition={high}", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 5"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    wait_for(urgent, lambda: state(urgent) == "COMPLETED", log)
    stopped = len(steps(run))
    assert stopped < 30, "the run must be preempted before its end for this to test anything"
    wait_for(job, lambda: state(job) == "PENDING" or state(job) == "RUNNING", log)
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now+1"])  # refused if it runs already
    wait_for(job, lambda: state(job) in ("COMPLETED", "FAILED"), log)
    assert state(job) == "COMPLETED", log.read_text()
    assert steps(run) == list(range(1, 31)), (stopped, log.read_text())
    assert command("train", *words, "run=alone", timeout=400).returncode == 0
    curves = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (run, tmp_path / "runs/alone")
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_every_run_of_a_sweep_is_a_slurm_job_and_a_stopped_one_comes_back(
    command: Command, shards: str, tmp_path: Path
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = [word for word in TINY if not word.startswith("samples")]
    words += [f"data.train={shards}", "samples=320", "seed=0,1", "run=s", "launch.threads=1"]  # 20 steps each
    place = ["launch=slurm", "launch.procs=1", "job.cpus=1", "job.hours=0.5"]
    with ThreadPoolExecutor() as pool:
        sweep = pool.submit(command, "train", "-m", *place, *words, timeout=500)
        folder = tmp_path / "runs/s/seed=0"
        started = time.monotonic()
        while len(steps(folder)) < 3:
            assert time.monotonic() - started < 300 and not sweep.done(), sweep.done() and sweep.result().stderr
            time.sleep(0.3)
        queue = subprocess.run(
            ["squeue", "-h", "-r", "-t", "R", "-o", "%i"], capture_output=True, text=True
        ).stdout.split()
        first = min(queue)
        subprocess.run(["scancel", "--signal=USR1", first], check=True)
        while "goes back into the queue" not in "".join(
            f.read_text() for f in (tmp_path / "runs/s/.submitit").rglob("*.out")
        ):
            assert time.monotonic() - started < 400 and not sweep.done(), sweep.done() and sweep.result().stderr
            time.sleep(0.3)
        time.sleep(2)
        subprocess.run(["scontrol", "update", f"JobId={first}", "StartTime=now+1"])
        done = sweep.result()
    assert done.returncode == 0, done.stderr
    for seed in (0, 1):
        assert steps(tmp_path / f"runs/s/seed={seed}") == list(range(1, 21))
    assert "seed=1" in (tmp_path / "runs/s/sweep.html").read_text()
