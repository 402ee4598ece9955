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
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem

from clipscale import checkpoint
from clipscale.checkpoint import Copies
from clipscale.checkpoint.loading import verify
from clipscale.cli.main import main as command
from clipscale.cli.train import result_if_complete
from clipscale.common.errors import StoppedError
from clipscale.config.data import DataConfig
from clipscale.config.sections import CheckpointConfig, EvalConfig, LaunchConfig
from clipscale.config.train import TrainConfig
from clipscale.data.loader.shard_stream import ShardStream
from clipscale.data.shards.index import lookup, update_indexes
from clipscale.eval.run import evaluate
from clipscale.eval.sets.item import ImageRef
from clipscale.launch import local
from clipscale.lifecycle.stopping import SignalError
from clipscale.log.records import read_metrics
from clipscale.log.sinks import Sinks
from clipscale.step.next_step_info import NextStepInfo
from clipscale.train import TrainLoop, train
from tests.data.files import write_shards
from tests.data.shards.web import Web, serving
from tests.eval.sets import ColourModel, classification_set, evaluation
from tests.support.checkpoints import ONE_RANK, save, steps
from tests.support.forked_processes import forks
from tests.support.ranks import run_ranks
from tests.support.runs import curve, four_step_config, on_a_rank

# Within which a signal is heard on a busy machine; docs/runs.md has the times on a quiet one. What does not hear it
# takes 60 s.
HEARD_S = 30.0


@contextmanager
def signalled(ready: Callable[[], bool], number: int = signal.SIGTERM) -> Iterator[None]:
    """This process gets the signal when it has been `ready` for half a second; within HEARD_S the run in the body
    drops its step, and saves."""
    sent: list[float] = []
    heard: list[float] = []
    save = TrainLoop.save_at_once

    def save_at_once(run: TrainLoop) -> None:
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
    with mock.patch.object(TrainLoop, "save_at_once", save_at_once):
        try:
            yield
        finally:
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
        config = four_step_config("", tmp_path / "run", samples=168, data=data, checkpoint=CheckpointConfig(every="0"))
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
            train(four_step_config("", tmp_path / "run", data=data))
    assert not checkpoint.checkpoints_of(tmp_path / "run")


def late(rank: int, world: int, config: TrainConfig, port: int, asked: int) -> str:
    """A rank of a run; in the third step the storage of rank 1 is silent, and then rank `asked` gets a signal."""
    dist.destroy_process_group()  # the run makes its own, with a store
    os.environ["MASTER_PORT"] = str(port)
    next_sample = ShardStream.next_sample
    taken = 0
    waits = threading.Event()

    def silent(stream: ShardStream, row: Any) -> Any:
        nonlocal taken
        taken += rank
        while taken > 15:
            waits.set()
            stream._store.poll()
            time.sleep(0.05)
        return next_sample(stream, row)

    records = Path(config.run) / "metrics.jsonl"
    with mock.patch.object(ShardStream, "next_sample", silent), pytest.raises(StoppedError) as stopped:
        if rank == asked:
            with signalled(waits.is_set if rank else lambda: len(read_metrics(records)) == 2):
                train(config)
        else:
            train(config)
    return str(stopped.value)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.mark.parametrize("asked", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_all_ranks_leave_when_one_is_late_and_either_is_asked(shards: str, tmp_path: Path, asked: int) -> None:
    """Rank 0 waits for rank 1 in a collective, where no handler runs, and rank 1 for its storage."""
    config = four_step_config(shards, tmp_path / "run", samples=60, checkpoint=CheckpointConfig(every="0"))
    lines = run_ranks(late, 2, config, free_port(), asked)
    (saved,) = checkpoint.checkpoints_of(tmp_path / "run")
    step = checkpoint.step_of(saved)
    assert step > 0 and lines == [f"stopped by SIGTERM after step {step} and saved"] * 2
    run_ranks(on_a_rank, 2, config)
    run_ranks(on_a_rank, 2, replace(config, run=str(tmp_path / "whole")))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


# -- an evaluation -----------------------------------------------------------------------------------------------------


class SilentPictures:
    """The storage of an evaluation's pictures: it stops answering `when`, and a reading waits then."""

    def __init__(self, when: Callable[[], bool]) -> None:
        self.when = when
        self.waits, self.ended = threading.Event(), threading.Event()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        read = ImageRef.read

        def silent(image: ImageRef) -> bytes:
            if self.when():
                self.waits.set()
                self.ended.wait()
            return read(image)

        with mock.patch.object(ImageRef, "read", silent):
            try:
                yield
            finally:
                self.ended.set()


def evaluated(shards: str, tmp_path: Path, batch: int) -> TrainConfig:
    """A run that evaluates six pictures after each step, in batches of so many."""
    sets = EvalConfig(every=1, sets=[str(classification_set(tmp_path / "set"))], batch=batch)
    return four_step_config(shards, tmp_path / "run", samples=36, eval=sets, checkpoint=CheckpointConfig(every="0"))


@pytest.mark.slow  # below two ranks do it
def test_a_run_whose_pictures_of_an_evaluation_do_not_come_is_saved(shards: str, tmp_path: Path) -> None:
    """After the step before it, and its resumed run has the curve of an undisturbed one."""
    config = evaluated(shards, tmp_path, 3)
    results = tmp_path / "run/eval"
    silent = SilentPictures(lambda: (results / "step_00000001.json").exists())
    with silent(), signalled(silent.waits.is_set), pytest.raises(StoppedError, match="SIGTERM after step 2 and saved"):
        train(config)
    assert steps(tmp_path / "run") == [2]
    assert not (results / "step_00000002.json").exists(), "half of the pictures are not a result"
    train(config)
    train(replace(config, run=str(tmp_path / "whole"), eval=EvalConfig()))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def late_pictures(rank: int, world: int, config: TrainConfig, port: int, asked: int) -> str:
    """A rank of a run; after step 2 the pictures of rank 1 do not come, and then rank `asked` gets a signal."""
    dist.destroy_process_group()  # the run makes its own, with a store
    os.environ["MASTER_PORT"] = str(port)
    folder = Path(config.run)
    silent = SilentPictures(lambda: rank == 1 and (folder / "eval/step_00000001.json").exists())
    records = folder / "metrics.jsonl"
    with silent(), pytest.raises(StoppedError) as stopped:
        if rank == asked:
            with signalled(silent.waits.is_set if rank else lambda: len(read_metrics(records)) == 2):
                train(config)
        else:
            train(config)
    return str(stopped.value)


@pytest.mark.parametrize(("asked", "batch"), [(0, 3), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_all_ranks_leave_an_evaluation_when_the_pictures_of_one_do_not_come(
    shards: str, tmp_path: Path, asked: int, batch: int
) -> None:
    """Rank 0 waits for rank 1 in a collective, where no handler runs. A rank's only batch is the last, after which no
    vote follows."""
    config = evaluated(shards, tmp_path, batch)
    lines = run_ranks(late_pictures, 2, config, free_port(), asked)
    assert lines == ["stopped by SIGTERM after step 2 and saved"] * 2
    assert steps(tmp_path / "run") == [2]
    assert not (tmp_path / "run/eval/step_00000002.json").exists()


# -- the end -----------------------------------------------------------------------------------------------------------


@contextmanager
def closing_for_long(then: Callable[[], None]) -> Iterator[None]:
    """A service that takes the records of runs does not answer when they end."""

    def close(sinks: Sinks) -> None:
        then()
        time.sleep(60)

    with mock.patch.object(Sinks, "close", close):
        yield


@pytest.mark.parametrize(("number", "line"), [(signal.SIGTERM, "^stopped by SIGTERM outside"), (signal.SIGINT, "^st")])
def test_a_run_that_waits_for_a_service_at_its_end_ends_at_once(
    shards: str, tmp_path: Path, number: int, line: str
) -> None:
    config = four_step_config(shards, tmp_path / "run", samples=12, launch=LaunchConfig(procs=1))
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    with closing_for_long(send), pytest.raises(StoppedError, match=line):
        local.run(config)
    assert time.monotonic() - sent[0] < HEARD_S
    assert steps(tmp_path / "run") == [1] and len(curve(tmp_path / "run")) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_waits_for_its_last_copy_ends_at_once(shards: str, tmp_path: Path, number: int) -> None:
    """The store does not answer. All is saved, and the same command copies it."""
    copied = CheckpointConfig(copy=str(tmp_path / "store"))
    config = four_step_config(shards, tmp_path / "run", samples=12, launch=LaunchConfig(procs=1), checkpoint=copied)
    close = Copies.close
    sent = []
    ended = threading.Event()

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    def closed(copies: Copies, *given: Any) -> None:
        threading.Timer(0.5, send).start()
        close(copies, *given)

    with (
        mock.patch.object(LocalFileSystem, "put_file", lambda *_, **__: ended.wait()),
        mock.patch.object(Copies, "close", closed),
        pytest.raises(StoppedError, match=r"^stopped"),
    ):
        local.run(config)
    assert time.monotonic() - sent[0] < HEARD_S
    ended.set()
    assert steps(tmp_path / "run") == [1] and result_if_complete(config) is None


def test_a_second_signal_while_a_stopped_run_closes_keeps_its_line(shards: str, tmp_path: Path) -> None:
    config = four_step_config(shards, tmp_path / "run", launch=LaunchConfig(procs=1))
    began: list[float] = []

    def send() -> None:
        began.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    def stopped_after_one(run: TrainLoop) -> NextStepInfo:
        if run.step == 1:
            raise SignalError(signal.SIGTERM)
        return run_step(run)

    run_step = TrainLoop.run_step
    with (
        mock.patch.object(TrainLoop, "run_step", stopped_after_one),
        closing_for_long(send),
        pytest.raises(StoppedError, match=r"^stopped by SIGTERM after step 1 and saved$"),
    ):
        local.run(config)
    assert time.monotonic() - began[0] < HEARD_S
    assert steps(tmp_path / "run") == [1]


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


def of_an_evaluation(config: TrainConfig) -> dict:
    """The verb `eval`, waiting for pictures that do not come."""
    sets = evaluation(EvalConfig(sets=[str(classification_set(Path(config.run).with_name("set")))]))
    silent = SilentPictures(lambda: True)
    with silent():
        threading.Thread(target=lambda: silent.waits.wait() and Path(config.run).mkdir(), daemon=True).start()
        return evaluate(ColourModel(), sets, ONE_RANK)  # type: ignore[arg-type]


def of_an_index(config: TrainConfig) -> dict:
    """The state of indexed shards, on a file system that does not answer."""
    folder = Path(config.run).with_name("set")
    urls = [str(folder / f"{number:05}.tar") for number in range(2)]
    write_shards(folder, [3, 3])
    list(update_indexes(urls))

    def silent(path: str) -> None:
        Path(config.run).mkdir(exist_ok=True)
        time.sleep(60)

    with mock.patch("clipscale.data.shards.index.local_state", silent):
        lookup(urls)
    return {}


def of_a_checkpoint(config: TrainConfig) -> dict:
    """The checksums of a checkpoint, on a file system that does not answer."""
    folder = Path(config.run).with_name("earlier")
    save(folder, 1, {"model": {"w": torch.zeros(1)}}, keep=0)

    def silent(path: Path) -> None:
        Path(config.run).mkdir(exist_ok=True)
        time.sleep(60)

    with mock.patch("clipscale.checkpoint.loading.size_and_crc32", silent):
        verify(checkpoint.path_of(folder, 1))
    return {}


def started(config: TrainConfig, main: str, output: Path) -> None:
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests
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
        (of_an_evaluation, signal.SIGTERM),
        (of_an_evaluation, signal.SIGINT),
        (of_an_index, signal.SIGTERM),
        (of_a_checkpoint, signal.SIGTERM),
    ],
)
def test_a_start_ends_at_once(tmp_path: Path, main: Callable[[TrainConfig], dict], number: signal.Signals) -> None:
    config = TrainConfig(run=str(tmp_path / "run"), device="cpu", plan=False, launch=LaunchConfig(procs=1))
    process = forks().Process(target=started, args=(config, f"{__name__}:{main.__name__}", tmp_path / "err"))
    with mock.patch.object(local, "TRAIN_FUNCTION", f"{__name__}:{main.__name__}"):
        process.start()
    while not (tmp_path / "run").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    assert process.pid
    os.kill(process.pid, number)
    sent = time.monotonic()
    process.join(HEARD_S + 10)
    counted = signal.SIGTERM if number is signal.SIGUSR1 else number
    assert process.exitcode == 128 + counted
    assert time.monotonic() - sent < HEARD_S
    name = "" if number is signal.SIGINT else f" by {counted.name}"
    assert (tmp_path / "err").read_text().splitlines()[-1].startswith(f"stopped{name}")


def commanded(words: list[str], output: Path) -> None:
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
    mock.patch("multiprocessing.parent_process", lambda: None).start()  # as of a command
    os._exit(command(words))


TRAIN = ["train", "model=vit-b32", "batch=8", "samples=16", "device=cpu", "plan=false", "launch.procs=1"]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        pytest.param([*TRAIN, "data.train=s3://bucket/*.tar"], "", id="a-first-answer"),
        pytest.param([*TRAIN, "data.train=s3://bucket/*.tar"], "list-type", id="a-listing"),
        pytest.param([*TRAIN, "checkpoint.copy=s3://bucket/run", "data.train={}"], "", id="a-copy"),
        pytest.param(["data", "index", "{}"], "", id="an-index"),
        pytest.param(["data", "check", "{}"], "", id="a-check"),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_command_whose_server_is_silent_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], asked: str, number: signal.Signals
) -> None:
    """`asked`: in the requests that have no answer."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "tests")
    with serving(Web(tmp_path)) as web:
        monkeypatch.setenv("AWS_ENDPOINT_URL", web.url)
        web.faults = lambda number, path: "silent" if asked in path else None
        given = [word.format(f"{web.url}/00000.tar") for word in words]
        if words[0] == "train":
            given.append(f"run={tmp_path / 'run'}")
        process = forks().Process(target=commanded, args=(given, tmp_path / "err"))
        process.start()
        while not web.done["silent"]:
            time.sleep(0.01)
            assert process.is_alive(), (tmp_path / "err").read_text()
        time.sleep(0.2)
        assert process.pid
        os.kill(process.pid, number)
        sent = time.monotonic()
        process.join(HEARD_S + 10)
    assert process.exitcode in (128 + number, -number)
    assert time.monotonic() - sent < HEARD_S
    assert "Traceback" not in (tmp_path / "err").read_text()
