"""Workers start, report their failures, and never outlive the launcher."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from clipscale.common.errors import UserError
from clipscale.config.sections import LaunchConfig
from clipscale.config.train import TrainConfig
from clipscale.launch import local
from tests.conftest import TINY

LONG = (
    *(word for word in TINY if not word.startswith(("samples", "data"))),
    "samples=1M",
    "data.workers=1",
    "launch.procs=2",
)
"""A run of two workers, each with a loader process, long enough to be stopped."""

TRAIN = (sys.executable, "-m", "clipscale", "train")
"""The command as a process of its own."""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Iterator[Start]:
    """`start(words)`: a command in the background, in its own session. All its processes end with the test."""
    begun: list[subprocess.Popen[str]] = []

    def run(*words: str, **variables: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            words,
            cwd=tmp_path,
            env=environment | variables,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        )
        begun.append(process)
        return process

    yield run
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until(true: Callable[[], bool], *processes: subprocess.Popen[str], seconds: float = 180) -> None:
    """Wait for what these processes do. Fails when one of them ends before."""
    deadline = time.monotonic() + seconds
    while not true():
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, ended[0].communicate()[1]
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(0.05)


Running = tuple[subprocess.Popen[str], list[psutil.Process], list[psutil.Process]]


def training(start: Start, shards: str, folder: Path, *words: str) -> Running:
    """A running run, its two workers, and all its child processes."""
    process = start(*TRAIN, *LONG, f"data.train={shards}", "run=long", *words)
    wait_until(lambda: has_steps(folder / "runs/long"), process)
    parent = psutil.Process(process.pid)
    workers = [child for child in parent.children() if "spawn_main" in " ".join(child.cmdline())]
    assert len(workers) == 2, [child.cmdline() for child in parent.children()]
    return process, workers, parent.children(recursive=True)


def has_steps(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def mistaken(config: TrainConfig) -> dict[str, Any]:
    raise UserError(f"run={config.run}: found by a worker")


@pytest.mark.slow  # as in test_rendezvous.py
def test_a_workers_mistake_comes_back_as_if_made_here(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """At once, whatever number of restarts is allowed."""
    launch = LaunchConfig(procs=2, threads=1, restarts=2)
    config = TrainConfig(run=str(tmp_path / "run"), batch=16, device="cpu", launch=launch)
    with pytest.raises(UserError, match=rf"^run={tmp_path}/run: found by a worker$"):
        local.run(config, f"{__name__}:mistaken")
    assert "restart" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_its_name_and_takes_the_others_along(
    start: Start, shards: str, tmp_path: Path
) -> None:
    process, workers, everyone = training(start, shards, tmp_path, "data.workers=0")
    workers[1].kill()
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "killed by SIGKILL" in errors.splitlines()[-1], errors
    assert errors.splitlines()[-1].startswith("error: worker 1 failed")
    assert gone(everyone, 15)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_workers_too(start: Start, shards: str, tmp_path: Path, number: signal.Signals) -> None:
    process, _, everyone = training(start, shards, tmp_path)
    if number is signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 128 + number, errors
    assert errors.splitlines()[-1] == f"stopped by {number.name}; go on with run=runs/long resume=auto"
    assert "Traceback" not in errors
    assert gone(everyone, 15)


def test_the_cause_is_shown_and_not_the_ranks_that_it_took_along() -> None:
    def failure(text: str, timestamp: int) -> SimpleNamespace:
        message = {"message": text, "extraInfo": {"py_callstack": "stack"}}
        return SimpleNamespace(message=message, timestamp=timestamp, exitcode=1)

    lost = failure("RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:1", 5)
    error: Any = SimpleNamespace(failures={0: lost, 1: failure("ValueError: bad row", 5), 2: lost})
    assert str(local.first_failure(error)) == "worker 1 failed: ValueError: bad row"


def test_unnamed_runs_of_the_same_second_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    configs = [TrainConfig(batch=16, samples=16, run="runs/20260101-000000-tiny-16") for _ in range(3)]
    for config in configs:
        local.make_ready(config, named=False)
    assert sorted(config.run for config in configs) == sorted(
        str(path.relative_to(tmp_path)) for path in tmp_path.glob("runs/*")
    )
    assert len({config.run for config in configs}) == 3


def test_workers_get_time_to_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Any] = []
    before = dict(os.environ)

    def elastic_launch(config: Any, _: Any) -> Callable[..., dict[int, Any]]:
        made.append(config)
        return lambda *_: {0: {}}

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", elastic_launch)
    config = TrainConfig(batch=16, samples=16, run=str(tmp_path), launch=LaunchConfig(procs=2, grace_s=44.5))
    local.run(config)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    local.run(config)
    if not hasattr(made[0], "shutdown_timeout"):
        pytest.skip("this torch always waits 30 s")
    assert [config.shutdown_timeout for config in made] == [45 + local.MARGIN_S, 7]
    assert dict(os.environ) == before | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}


def test_a_requeued_job_finds_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, job, age in (("older", "7", 100), ("newer", "7", 50), ("others", "8", 0), ("unread", None, 0)):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "env.json"
        file.write_text(json.dumps({"variables": {"SLURM_JOB_ID": job}}) if job else "[3]")
        os.utime(file, (file.stat().st_mtime - age,) * 2)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert local.requeued_run(tmp_path) is None, "a first start begins a run of its own"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert local.requeued_run(tmp_path) == str(tmp_path / "newer")
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    assert local.requeued_run(tmp_path) is None
