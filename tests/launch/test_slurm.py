"""launch/slurm.sh on a real Slurm with two nodes or more, whose names resolve.

One host can play several (NodeHostname=localhost and a Port for each node), with their names in /etc/hosts.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clipscale.config.presets import PACKAGE
from tests.conftest import TINY


def nodes() -> int:
    """Nodes that would take a job."""
    if shutil.which("sinfo") is None:
        return 0
    done = subprocess.run(["sinfo", "-h", "-t", "idle,mix", "-o", "%D"], capture_output=True, text=True)
    return sum(map(int, done.stdout.split()))


pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(nodes() < 2, reason="needs a Slurm controller with two idle nodes"),
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


def test_two_nodes_train_one_run(submit: Submit, shards: str, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    job = submit(*TINY, f"data.train={shards}", "run=both")
    wait_for(job, lambda: state(job) in ("COMPLETED", "FAILED"), log)
    printed = log.read_text()
    assert state(job) == "COMPLETED", printed
    assert printed.count("done: runs/both (step 2") == 1, printed
    assert steps(tmp_path / "runs/both") == [1, 2]
    assert json.loads((tmp_path / "runs/both/env.json").read_text())["processes"] == 2


def test_a_job_told_to_stop_saves_goes_back_into_the_queue_and_ends_the_run(
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
