"""The first signal is recorded, a later Ctrl-C ends the run, and a step that would outlive the grace is abandoned
without a trace.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from clipscale import checkpoint
from clipscale.cli import main as cli
from clipscale.common.errors import StoppedError
from clipscale.config.sections import CacheConfig, CheckpointConfig, EvalConfig, LaunchConfig
from clipscale.config.train import TrainConfig
from clipscale.distributed.world import World
from clipscale.launch import stopping
from clipscale.launch.stopping import AbandonedError, Stop
from clipscale.train import Run, train
from tests.support.ranks import run_ranks
from tests.support.runs import curve, settings
from tests.test_train import start, wait_for_lines

ALONE = World(0, 1, torch.device("cpu"))


def test_one_ctrl_c_is_recorded_and_a_later_one_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stop, before = Stop(ALONE, 60), signal.getsignal(signal.SIGINT)
    with stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the same Ctrl-C, forwarded by the launcher
        assert stop.number == signal.SIGINT
        assert capfd.readouterr().err.count("Ctrl-C again") == 1
        monkeypatch.setattr(stopping, "AGAIN_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_schedulers_warning_may_come_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stopping, "AGAIN_S", -1.0)
    with (stop := Stop(World(1, 2, torch.device("cpu")), 60)):
        assert stop.number == 0
        signal.raise_signal(signal.SIGUSR1)
        assert stop.number == signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)
        assert stop.number == signal.SIGTERM
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("number", "expected_s", "save_s", "now", "late"),
    [
        (signal.SIGTERM, 20.0, 0.0, 0.0, False),  # half of 60 s is left for a save that was never measured
        (signal.SIGTERM, 31.0, 0.0, 0.0, True),
        (signal.SIGTERM, 31.0, 5.0, 0.0, False),
        (signal.SIGTERM, 51.0, 5.0, 0.0, True),
        (signal.SIGTERM, 0.0, 5.0, 49.0, False),  # a first step: it goes on while it can
        (signal.SIGTERM, 0.0, 5.0, 51.0, True),
        (signal.SIGINT, 4.0, 1.0, 0.0, True),  # nobody waits a minute after Ctrl-C
        (signal.SIGINT, 2.0, 1.0, 0.0, False),
    ],
)
def test_a_step_goes_on_while_it_and_a_save_fit_the_grace(
    number: signal.Signals, expected_s: float, save_s: float, now: float, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping.time, "monotonic", lambda: 1000.0)
    with (stop := Stop(ALONE, 60)):
        stop.save_s = save_s
        stop.begin(expected_s)
        assert not stop.late(), "no signal has come"
        signal.raise_signal(number)
        monkeypatch.setattr(stopping.time, "monotonic", lambda: 1000.0 + now)
        assert stop.late() == late
        if late:
            with pytest.raises(AbandonedError):
                stop.check()


def with_signal_at(call: int, work: Callable[[], Any]) -> int:
    """Run `work`, whose `call`-th check of a stop comes with a SIGTERM; returns the status it stopped with."""
    check, calls = Stop.check, 0

    def signalled(stop: Stop) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGTERM)
        check(stop)

    with patch.object(Stop, "check", signalled):
        try:
            work()
        except StoppedError as stopped:
            return stopped.number
    return 0


def short(demo: Path, run: Path, **changes: Any) -> TrainConfig:
    """Two steps; six chunks of images and four of texts in each step, in both passes."""
    fixed = {"cache": CacheConfig(image_chunk=11, text_chunk=16), "launch": LaunchConfig(grace_s=0)}
    return settings(demo, run, samples=128, **{**fixed, **changes})


@pytest.fixture(scope="module")
def whole(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The curve of the undisturbed run."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    train(short(demo, run))
    return curve(run)


@pytest.mark.parametrize("call", [pytest.param(3, marks=pytest.mark.slow), 15])
def test_a_step_that_would_outlive_the_grace_is_abandoned_without_a_trace(
    demo: Path, whole: list[float], tmp_path: Path, call: int
) -> None:
    config = short(demo, tmp_path / "run", checkpoint=CheckpointConfig(minutes=0))
    assert with_signal_at(20 + call, lambda: train(config)) == signal.SIGTERM
    assert [path.name for path in checkpoint.found(tmp_path / "run")] == ["step_00000001"]
    assert curve(tmp_path / "run") == whole[:1]
    train(config)
    assert curve(tmp_path / "run") == whole


def test_the_first_step_has_nothing_to_save(demo: Path, tmp_path: Path) -> None:
    assert with_signal_at(12, lambda: train(short(demo, tmp_path / "run"))) == signal.SIGTERM
    assert not checkpoint.found(tmp_path / "run")


@pytest.mark.slow
def test_an_evaluation_is_abandoned_too(demo: Path, tmp_path: Path) -> None:
    sets = EvalConfig(sets=[str(demo / "objects")], limit=8, batch=4)
    config = short(demo, tmp_path / "run", eval=sets)
    assert with_signal_at(2 * 20 + 2, lambda: train(config)) == signal.SIGTERM
    assert [path.name for path in checkpoint.found(tmp_path / "run")] == ["step_00000002"]
    assert train(config)["eval"], "a resumed run evaluates"


def on_rank_1(rank: int, world: int, config: TrainConfig, call: int) -> int:
    return with_signal_at(call if rank == 1 else -1, lambda: train(config))


@pytest.mark.slow  # three starts of two ranks
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_all_ranks_abandon_a_step_at_the_same_chunk(demo: Path, tmp_path: Path, parallel: str) -> None:
    launch = LaunchConfig(grace_s=0, parallel=parallel)
    config = short(demo, tmp_path / "run", launch=launch)
    assert run_ranks(on_rank_1, 2, short(demo, tmp_path / "whole", launch=launch), -1) == [0, 0]
    assert run_ranks(on_rank_1, 2, config, 10 + 7) == [signal.SIGTERM] * 2
    assert [path.name for path in checkpoint.found(tmp_path / "run")] == ["step_00000001"]
    assert run_ranks(on_rank_1, 2, config, -1) == [0, 0]
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_before_the_end(demo: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = start(demo, tmp_path / "run")
    wait_for_lines(process, tmp_path / "run/metrics.jsonl", 1)
    assert process.pid
    os.kill(process.pid, number)
    process.join(120)
    assert process.exitcode != 0
    assert "stopped by a signal after step" in (tmp_path / "run/error").read_text()
    step = len(curve(tmp_path / "run"))
    assert checkpoint.found(tmp_path / "run")[-1] == checkpoint.path_of(tmp_path / "run", step)


def test_a_run_that_was_stopped_ends_with_the_signals_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(argv: list[str]) -> int:
        raise StoppedError("stopped by a signal after step 3; go on with run=a resume=auto")

    monkeypatch.setattr(cli, "dispatch", stopped)
    assert cli.main(["train"]) == 143
    assert capsys.readouterr().err == "error: stopped by a signal after step 3; go on with run=a resume=auto\n"


def signalled_on_one_rank(rank: int, world: int, config: TrainConfig, number: int, victim: int) -> tuple[int, int, int]:
    """A rank gets the signal within its second step.

    Its status and step, and how many collectives decide on a step's save.
    """
    step, due, all_reduce = Run.optimizer_step, Run.save_due, torch.distributed.all_reduce
    calls: list[int] = []
    steps: list[int] = []

    def with_signal(run: Run) -> dict[str, Any]:
        if rank == victim and run.step == 1:
            os.kill(os.getpid(), number)
        return step(run)

    def counted(run: Run) -> bool:
        with (
            patch.object(torch.distributed, "all_reduce", lambda *a, **k: calls.append(1) or all_reduce(*a, **k)),
            patch.object(torch.distributed, "broadcast_object_list", side_effect=AssertionError("two broadcasts")),
        ):
            steps.append(run.step)
            return due(run)

    with patch.object(Run, "optimizer_step", with_signal), patch.object(Run, "save_due", counted):
        try:
            train(config)
        except StoppedError as stopped:
            return stopped.number, steps[-1], len(calls)
    return 0, steps[-1], len(calls)


@pytest.mark.parametrize(
    ("number", "victim"),
    [
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_any_rank_stops_all_at_one_step_with_a_save(
    demo: Path, tmp_path: Path, number: signal.Signals, victim: int
) -> None:
    found = run_ranks(signalled_on_one_rank, 2, settings(demo, tmp_path / "run"), int(number), victim)
    assert found == [(signal.SIGTERM, 2, 2)] * 2, "status, step, and one reduction in each of two steps"
    assert [path.name for path in checkpoint.found(tmp_path / "run")] == ["step_00000002"]
