"""Workers start through torchrun's launcher, report their failures, and never outlive the launcher."""

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.launcher import api

from clipscale.checkpoint.saving import UnwritableError
from clipscale.common.errors import LoaderError, StoppedError, UserError
from clipscale.config.sections import LaunchConfig
from clipscale.config.train_config import TrainConfig
from clipscale.distributed.join import destroy_world, init_world
from clipscale.launch import local
from clipscale.launch.failures import cause_of_end, write_failure
from clipscale.launch.workers import WorkerTask
from tests.conftest import TINY
from tests.eval.sets import classification_set
from tests.support.user_errors import refused

LONG = [word for word in TINY if not word.startswith(("samples", "data"))]
LONG += ["samples=1M", "data.workers=1", "launch.procs=2", "run=long"]
"""A run of two workers, each with a loader process, long enough to be stopped."""

Running = tuple[subprocess.Popen[str], list[psutil.Process], list[psutil.Process]]


@pytest.fixture
def training(tmp_path: Path, short_folder: Path, environment: dict, shards: str) -> Iterator[Running]:
    """A running run in its own session, its two workers, and all its child processes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "clipscale", "train", *LONG, f"data.train={shards}"],
        cwd=tmp_path,
        env=environment | {"TMPDIR": str(short_folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = tmp_path / "runs/long/metrics.jsonl"
    deadline = time.monotonic() + 180
    while not (metrics.is_file() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent = psutil.Process(process.pid)
    workers = [child for child in parent.children() if "spawn_main" in " ".join(child.cmdline())]
    assert len(workers) == 2, [child.cmdline() for child in parent.children()]
    yield process, workers, parent.children(recursive=True)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether they end. Nobody may wait for orphans, so a zombie is gone, too."""
    return all(
        not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
        for left in psutil.wait_procs(processes, timeout=seconds)[1]
    )


def two(tmp_path: Path) -> TrainConfig:
    return TrainConfig(run=str(tmp_path / "run"), batch=16, device="cpu", plan=False, launch=LaunchConfig(procs=2))


def ring(config: TrainConfig) -> dict:
    """A worker that meets the other one."""
    world = init_world("cpu")
    ranks = world.all_gather_object(world.rank)
    destroy_world()
    return {"ranks": ranks, "threads": torch.get_num_threads()}


def this_process(config: TrainConfig) -> dict:
    return {"pid": os.getpid()}


def mistaken(config: TrainConfig) -> dict:
    """Rank 1 finds a mistake while rank 0 waits for it."""
    world = init_world("cpu")
    if world.rank == 1:
        raise UserError(f"run={config.run}: found by a worker")
    return {"ranks": world.all_gather_object(0)}


def test_a_last_save_that_failed_is_a_mistake_and_no_stopped_run(tmp_path: Path) -> None:
    """A scheduler signals the launcher: with the status of a stopped run it would queue the job for ever."""

    def elastic_launch(elastic: Any, entry: Any) -> Any:
        def launched(config: TrainConfig, task: WorkerTask[TrainConfig, dict], folder: Path) -> None:
            write_failure(folder, 0, UnwritableError("the disk is full"))
            raise SignalException("", signal.SIGTERM)

        return launched

    with patch.object(api, "elastic_launch", elastic_launch), refused("disk is full") as failure:
        local.launch(two(tmp_path), this_process)
    assert not isinstance(failure.value, StoppedError)


def test_workers_meet_and_rank_0s_result_comes_back(tmp_path: Path) -> None:
    handlers = {number: signal.getsignal(number) for number in local.FORWARDED_SIGNALS}
    assert local.launch(two(tmp_path), ring) == {"ranks": [0, 1], "threads": 1}
    assert handlers == {number: signal.getsignal(number) for number in local.FORWARDED_SIGNALS}


def open_files(config: TrainConfig) -> dict:
    """A worker that begins with a low limit: its limits after it has joined, and its files of the two groups."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    world = init_world("cpu")
    before = psutil.Process().num_fds()
    for group in (world.cpu_group, world.checkpoint_group):
        dist.all_reduce(torch.zeros(1), group=group)
    ranks = world.all_gather_object((*resource.getrlimit(resource.RLIMIT_NOFILE), psutil.Process().num_fds() - before))
    destroy_world()
    return {"ranks": ranks}


@pytest.mark.slow  # it starts processes, as the test before it
@pytest.mark.parametrize("procs", [2, 12])
def test_open_files_are_allowed_and_few_whatever_the_ranks(tmp_path: Path, procs: int) -> None:
    config = replace(two(tmp_path), batch=24, launch=LaunchConfig(procs=procs))
    for soft, hard, files in local.launch(config, open_files)["ranks"]:
        assert soft == hard and files <= 14, f"{soft} of {hard} allowed, {files} open over {procs} ranks"


@pytest.mark.slow
def test_a_workers_mistake_comes_back_as_if_made_here_and_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake leaves no file."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with refused(rf"^run={tmp_path}/run: found by a worker$"):
        local.launch(two(tmp_path), mistaken)
    assert not [*(tmp_path / "tmp").iterdir()]


def test_workers_stay_near_their_gpus_where_these_are_near_different_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case has one GPU more. The machine does not say where the last one is."""
    monkeypatch.setattr(local, "GPUS", tmp_path)
    monkeypatch.setattr("shutil.which", str)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    for number, bound in (("0", False), ("0 ", False), ("1", True), ("-1", False)):
        (tmp_path / number).mkdir()
        (tmp_path / number / "numa_node").write_text(number)
        assert bool(local.numa_options("auto", 3)) is bound
        assert not local.numa_options("cpu", 3) and not local.numa_options("auto", 4)


def test_one_worker_is_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(run=str(tmp_path), device="cpu", plan=False)
    calls: list[str] = []
    result = local.launch(
        config,
        this_process,
        prepare=lambda _: calls.append("prepare"),  # imports, while the plan is made
        check_plan=lambda: calls.append("check_plan"),
    )
    assert result == {"pid": os.getpid()} and calls == ["prepare", "check_plan"]
    monkeypatch.setattr(local, "launch_workers", lambda count, config, task: {"count": count})
    assert local.launch(config, this_process, isolated=True) == {"count": 1}
    config = replace(config, launch=LaunchConfig(procs=3))
    with refused(r"^batch=256 cannot be shared evenly by 3 processes; choose a multiple of 3"):
        local.launch(config, this_process)


def test_the_cause_is_shown_and_not_the_ranks_that_it_took_along(tmp_path: Path) -> None:
    def cause(*errors: Exception, status: int = 1) -> Exception:
        """Lets ranks fail with these errors, one after the other; torch names the first."""
        for rank, error in enumerate(errors):
            write_failure(tmp_path, rank, error)
        noticed = SimpleNamespace(exitcode=status, signal_name=lambda: "SIGKILL")
        return cause_of_end(SimpleNamespace(failures={0: noticed}), tmp_path)

    lost = RuntimeError("Timed out waiting 1000ms for recv operation to complete")
    assert str(cause(lost, ValueError("bad row\nmore"), lost)) == "worker 1 failed: ValueError: bad row more"
    assert "killed by SIGKILL" in str(cause(lost, lost, lost, status=-9))
    assert str(cause(lost, lost, lost)).startswith("worker 0 failed: RuntimeError: Timed out")
    for error in (UserError("lr=1: unknown"), UnwritableError("full"), LoaderError("gone"), StoppedError("stopped", 2)):
        actual = cause(lost, error, lost)
        assert type(actual) is type(error) and str(actual) == str(error) and vars(actual) == vars(error)


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_its_name_and_takes_the_others_along(training: Running) -> None:
    process, workers, everyone = training
    workers[1].kill()
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("error: worker 1 failed: killed by SIGKILL"), errors
    assert gone(everyone, 15)


@pytest.mark.slow
def test_a_killed_launcher_takes_its_workers_along(training: Running) -> None:
    process, _, everyone = training
    process.kill()
    assert gone(everyone, 15)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_stops_the_workers_and_gives_the_status(
    training: Running, tmp_path: Path, number: signal.Signals
) -> None:
    process, _, everyone = training
    kill = os.killpg if number is signal.SIGINT else os.kill  # a terminal asks all
    kill(process.pid, number)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 128 + number, errors
    signalled = "stopped" if number is signal.SIGINT else "stopped by SIGTERM"
    last = errors.splitlines()[-1]
    assert re.fullmatch(rf"{signalled} after step \d+ and saved; the same command resumes it", last), errors
    assert "Traceback" not in errors and "torch/" not in errors, errors
    assert list((tmp_path / "runs/long/checkpoints").iterdir())
    assert gone(everyone, 15)


@pytest.mark.slow
def test_a_signal_after_the_last_evaluation_ends_the_run_in_seconds(
    tmp_path: Path, environment: dict, shards: str
) -> None:
    """A worker that has returned waits for torch's launcher, which after a signal waits for the worker's end."""
    sets = classification_set(tmp_path / "colours")
    words = [*TINY, "data.workers=1", "launch.procs=2", "run=short", f"data.train={shards}", f"eval.sets={sets}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "clipscale", "train", *words],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    lines = []
    for line in process.stdout:
        lines.append(line)
        if " eval step=" in line:
            os.killpg(process.pid, signal.SIGTERM)
            signalled_at = time.monotonic()
    assert process.wait() in (0, 128 + signal.SIGTERM), lines
    assert time.monotonic() - signalled_at < 60, lines
