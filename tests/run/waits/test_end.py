"""A run that waits at its end hears a signal."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fsspec.implementations.local import LocalFileSystem

from clipscale.checkpoint import CheckpointUploader
from clipscale.cli.complete_run import result_if_complete
from clipscale.cli.train_verb import launch_training
from clipscale.common.errors import StoppedError
from clipscale.config.sections import CheckpointConfig, LaunchConfig
from clipscale.log.sinks import Sinks
from clipscale.run.stopping import SignalError
from clipscale.run.train_loop import TrainLoop
from clipscale.step.train_step import StepResult
from tests.run.waits.signals import HEARD_S
from tests.support.checkpoints import steps
from tests.support.runs import curve, four_step_config


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
        launch_training(config)
    assert time.monotonic() - sent[0] < HEARD_S
    assert steps(tmp_path / "run") == [1] and len(curve(tmp_path / "run")) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_waits_for_its_last_copy_ends_at_once(shards: str, tmp_path: Path, number: int) -> None:
    """The store does not answer. All is saved, and the same command copies it."""
    copied = CheckpointConfig(copy=str(tmp_path / "store"))
    config = four_step_config(shards, tmp_path / "run", samples=12, launch=LaunchConfig(procs=1), checkpoint=copied)
    close = CheckpointUploader.finish
    sent = []
    ended = threading.Event()

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    def closed(uploader: CheckpointUploader, *given: Any) -> bool:
        threading.Timer(0.5, send).start()
        return close(uploader, *given)

    with (
        mock.patch.object(LocalFileSystem, "put_file", lambda *_, **__: ended.wait()),
        mock.patch.object(CheckpointUploader, "finish", closed),
        pytest.raises(StoppedError, match=r"^stopped"),
    ):
        launch_training(config)
    assert time.monotonic() - sent[0] < HEARD_S
    ended.set()
    assert steps(tmp_path / "run") == [1] and result_if_complete(config) is None


def test_a_second_signal_while_a_stopped_run_closes_keeps_its_line(shards: str, tmp_path: Path) -> None:
    config = four_step_config(shards, tmp_path / "run", launch=LaunchConfig(procs=1))
    began: list[float] = []

    def send() -> None:
        began.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    def stopped_after_one(run: TrainLoop) -> StepResult:
        if run.step == 1:
            raise SignalError(signal.SIGTERM)
        return run_step(run)

    run_step = TrainLoop.run_step
    with (
        mock.patch.object(TrainLoop, "run_step", stopped_after_one),
        closing_for_long(send),
        pytest.raises(StoppedError, match=r"^stopped by SIGTERM after step 1 and saved$"),
    ):
        launch_training(config)
    assert time.monotonic() - began[0] < HEARD_S
    assert steps(tmp_path / "run") == [1]
