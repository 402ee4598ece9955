"""Wherever a run waits it hears a signal within two seconds: it saves, or ends at once where nothing is to be saved."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from clipscale import checkpoint
from clipscale.common.errors import StoppedError
from clipscale.config.data import DataConfig
from clipscale.config.sections import CheckpointConfig, LaunchConfig
from clipscale.config.train import TrainConfig
from clipscale.data.loader.shard_stream import ShardStream
from clipscale.launch import local
from clipscale.log.records import read_metrics
from clipscale.train import Run, train
from tests.data.files import write_shards
from tests.data.shards.web import Web, serving
from tests.support.forks import forks
from tests.support.ranks import run_ranks
from tests.support.runs import curve, on_a_rank, small

# Within which a signal is heard, on a busy machine.
HEARD_S = 2.0


@contextmanager
def signalled(ready: Callable[[], bool], number: int = signal.SIGTERM) -> Iterator[None]:
    """This process gets the signal when it has been `ready` for half a second; within HEARD_S the run in the body
    drops its step, and saves."""
    sent: list[float] = []
    heard: list[float] = []
    save = Run.save_at_once

    def save_at_once(run: Run) -> None:
        heard.append(time.monotonic())
        save(run)

    def send() -> None:
        while not ready():
            time.sleep(0.01)
        time.sleep(0.5)
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    with mock.patch.object(Run, "save_at_once", save_at_once):
        yield
    assert sent and heard, "it ended before"
    assert heard[0] - sent[0] < HEARD_S
    thread.join()


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_run_whose_storage_falls_silent_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """In the training process and in a worker. The resumed run has the curve of an undisturbed one."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    write_shards(tmp_path / "set", [24, 24])
    with serving(Web(tmp_path)) as web:
        data = DataConfig(train=[f"{web.url}/set/{{00000..00001}}.tar"], workers=workers, shard_streams=2)
        config = small("", tmp_path / "run", samples=168, data=data, checkpoint=CheckpointConfig(every="0"))
        web.faults = lambda number, path: "silent" if number > 5 else None
        with signalled(lambda: web.done["silent"] > 0), pytest.raises(StoppedError, match=r"after step . and saved"):
            train(config)
        (saved,) = checkpoint.checkpoints_of(tmp_path / "run")
        assert 0 < checkpoint.step_of(saved) == len(curve(tmp_path / "run")) < 14
        web.faults = lambda number, path: None
        train(config)
        train(replace(config, run=str(tmp_path / "whole")))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_the_first_batch_that_never_comes_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    write_shards(tmp_path / "set", [24, 24])
    with serving(Web(tmp_path)) as web:
        data = DataConfig(train=[f"{web.url}/set/{{00000..00001}}.tar"], workers=0, shard_streams=2)
        web.faults = lambda number, path: "silent" if number > 1 else None
        with (
            signalled(lambda: web.done["silent"] > 0, signal.SIGINT),
            pytest.raises(StoppedError, match=r"^stopped in the first step: nothing is saved"),
        ):
            train(small("", tmp_path / "run", data=data))
    assert not checkpoint.checkpoints_of(tmp_path / "run")


def late(rank: int, world: int, config: TrainConfig, port: int, asked: int) -> str:
    """A rank of a run; in the third step the storage of rank 1 is silent, and then rank `asked` gets a signal."""
    dist.destroy_process_group()  # the run makes its own, with a store
    os.environ["MASTER_PORT"] = str(port)
    take, taken = ShardStream.take, 0
    waits = threading.Event()

    def silent(stream: ShardStream, row: Any) -> tuple[str, int]:
        nonlocal taken
        taken += rank
        while taken > 15:
            waits.set()
            stream._store.tick()
            time.sleep(0.05)
        return take(stream, row)

    records = Path(config.run) / "metrics.jsonl"
    began = time.monotonic()
    with mock.patch.object(ShardStream, "take", silent), pytest.raises(StoppedError) as stopped:
        if rank == asked:
            with signalled(waits.is_set if rank else lambda: len(read_metrics(records)) == 2):
                train(config)
        else:
            train(config)
    assert time.monotonic() - began < 30
    return str(stopped.value)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.mark.parametrize("asked", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_all_ranks_leave_when_one_is_late_and_either_is_asked(shards: str, tmp_path: Path, asked: int) -> None:
    """Rank 0 waits for rank 1 in a collective, where no handler runs, and rank 1 for its storage."""
    config = small(shards, tmp_path / "run", samples=60, checkpoint=CheckpointConfig(every="0"))
    lines = run_ranks(late, 2, config, free_port(), asked)
    (saved,) = checkpoint.checkpoints_of(tmp_path / "run")
    step = checkpoint.step_of(saved)
    assert step > 0 and lines == [f"stopped by SIGTERM after step {step} and saved"] * 2
    run_ranks(on_a_rank, 2, config)
    run_ranks(on_a_rank, 2, replace(config, run=str(tmp_path / "whole")))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


# -- a start -----------------------------------------------------------------------------------------------------------


def asleep(config: TrainConfig) -> dict:
    """A start that waits in Python, ready when its folder is there."""
    Path(config.run).mkdir()
    time.sleep(60)
    return {}


def in_a_library(config: TrainConfig) -> dict:
    """One that waits where no handler runs."""
    Path(config.run).mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    store.get("nobody sets it")
    return {}


def started(config: TrainConfig, main: str, output: Path) -> None:
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
    mock.patch("multiprocessing.parent_process", lambda: None).start()  # as of a command
    try:
        local.run(config, main)
    except StoppedError as stopped:
        os.write(2, f"{stopped}\n".encode())
        os._exit(128 + stopped.number)


@pytest.mark.parametrize(
    ("main", "number"),
    [
        (asleep, signal.SIGTERM),
        (asleep, signal.SIGINT),
        (asleep, signal.SIGHUP),
        (asleep, signal.SIGUSR1),
        (in_a_library, signal.SIGTERM),
    ],
)
def test_a_start_ends_at_once(tmp_path: Path, main: Callable[[TrainConfig], dict], number: signal.Signals) -> None:
    config = TrainConfig(run=str(tmp_path / "run"), device="cpu", plan=False, launch=LaunchConfig(procs=1))
    process = forks().Process(target=started, args=(config, f"{__name__}:{main.__name__}", tmp_path / "err"))
    with mock.patch.object(local, "TRAIN", f"{__name__}:{main.__name__}"):
        process.start()
    while not (tmp_path / "run").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    assert process.pid
    os.kill(process.pid, number)
    sent = time.monotonic()
    process.join(20)
    counted = signal.SIGTERM if number is signal.SIGUSR1 else number
    assert process.exitcode == 128 + counted
    assert time.monotonic() - sent < HEARD_S
    name = "" if number is signal.SIGINT else f" by {counted.name}"
    assert (tmp_path / "err").read_text().splitlines()[-1].startswith(f"stopped{name}")
