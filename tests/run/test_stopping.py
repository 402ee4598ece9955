"""A signal ends a run between two chunks: the step is thrown away without a trace, and a later Ctrl-C ends at once."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from clipscale.checkpoint.saving import UnwritableError
from clipscale.common.errors import StoppedError
from clipscale.common.signals import SIGNALS
from clipscale.config.model import ModelConfig
from clipscale.config.sections import CacheConfig, CheckpointConfig, EvalConfig, LaunchConfig
from clipscale.config.train_config import TrainConfig
from clipscale.distributed.world import AsyncReduction, World
from clipscale.run import signal_poller
from clipscale.run.signal_poller import SignalPoller
from clipscale.run.stopping import SignalError, exit_on_signal
from clipscale.train import train
from tests.conftest import Capture
from tests.support.checkpoints import ONE_RANK, steps
from tests.support.ranks import run_ranks
from tests.support.runs import ARCHITECTURE, curve, ten_step_config

# Of a step, in both passes: six of images and four of texts.
CHUNKS = 20


def two_step_config(demo: Path, run: Path, **changes: Any) -> TrainConfig:
    """Two steps, which draw random numbers."""
    model = ModelConfig(name="test", architecture=ARCHITECTURE, patch_dropout=0.3)
    cache = CacheConfig(chunk=["11", "16"])
    launch = LaunchConfig()
    return ten_step_config(demo, run, samples=128, **{"model": model, "cache": cache, "launch": launch, **changes})


def with_signal_at(call: int, work: Callable[[], Any]) -> int:
    """Run `work`, whose `call`-th poll comes with a SIGTERM; returns the status it stopped with."""
    poll = SignalPoller.poll
    calls = 0

    def signalled(poller: SignalPoller, **options: bool) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGTERM)
        poll(poller, **options)

    with patch.object(SignalPoller, "poll", signalled), patch.object(signal_poller, "VOTE_S", 0.0):
        try:
            work()
        except StoppedError as stopped:
            return stopped.signum
    return 0


def test_one_ctrl_c_is_recorded_and_a_later_one_ends_at_once(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    poller = SignalPoller(ONE_RANK)
    before = signal.getsignal(signal.SIGINT)
    with poller:
        poller.poll()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the same Ctrl-C, forwarded by the launcher
        assert capfd.readouterr().err.count("Ctrl-C again") == 1
        with pytest.raises(SignalError):
            poller.poll()
        monkeypatch.setattr(signal_poller, "SAME_CTRL_C_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("call", "works"), [(2, False), (len(SIGNALS) + 1, True)], ids=["set", "restored"])
def test_a_signal_while_handlers_change_ends_the_work_by_its_line(
    monkeypatch: pytest.MonkeyPatch, call: int, works: bool
) -> None:
    """It comes when the handler of SIGTERM has been set, or when that of SIGINT has been restored."""
    before = [signal.signal(signal.SIGHUP, signal.SIG_DFL), *map(signal.getsignal, SIGNALS[:3])]
    set_handler = signal.signal
    calls = 0

    def signalled(number: int, handler: Any) -> Any:
        nonlocal calls
        calls += 1
        earlier = set_handler(number, handler)
        if calls == call:
            signal.raise_signal(signal.SIGTERM)
        return earlier

    worked = False
    monkeypatch.setattr(signal, "signal", signalled)
    with pytest.raises(StoppedError, match="stopped by SIGTERM"), exit_on_signal():
        worked = True
    monkeypatch.undo()
    signal.signal(signal.SIGHUP, before[0])
    assert [*map(signal.getsignal, SIGNALS[:3])] == before[1:]
    assert worked == works and "signals" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("first", "second", "number"),
    [("SIGUSR1", "SIGTERM", signal.SIGTERM), ("SIGHUP", "SIGHUP", signal.SIGHUP), ("SIGUSR1", "SIGUSR1", 15)],
)
def test_warnings_of_a_scheduler_and_of_a_closed_terminal_may_come_again(
    monkeypatch: pytest.MonkeyPatch, first: str, second: str, number: int
) -> None:
    monkeypatch.setattr(signal_poller, "SAME_CTRL_C_S", -1.0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests
    poller = SignalPoller(ONE_RANK)
    with poller:
        signal.raise_signal(signal.Signals[first])
        signal.raise_signal(signal.Signals[second])
        with pytest.raises(SignalError) as caught:
            poller.poll()
    assert caught.value.signum == number


def test_a_closed_terminal_ends_no_run_of_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    poller = SignalPoller(ONE_RANK)
    with poller:
        signal.raise_signal(signal.SIGHUP)
        poller.poll()
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def whole(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The curve of the undisturbed run."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    train(two_step_config(demo, run))
    return curve(run)


@pytest.mark.parametrize("call", [pytest.param(3, marks=pytest.mark.slow), 15])
def test_a_step_is_thrown_away_and_taken_again_bit_for_bit(
    demo: Path, whole: list[float], tmp_path: Path, call: int
) -> None:
    """The signal comes in the first pass or in the second."""
    config = two_step_config(demo, tmp_path / "run", checkpoint=CheckpointConfig(every="0"))
    assert with_signal_at(CHUNKS + call, lambda: train(config)) == signal.SIGTERM
    assert steps(tmp_path / "run") == [1]
    assert curve(tmp_path / "run") == whole[:1]
    train(config)
    assert curve(tmp_path / "run") == whole


def test_the_first_step_has_nothing_to_save(demo: Path, tmp_path: Path) -> None:
    assert with_signal_at(12, lambda: train(two_step_config(demo, tmp_path / "run"))) == signal.SIGTERM
    assert not steps(tmp_path / "run")


@pytest.mark.parametrize("every", [0, 1])  # a save that the signal begins, and one that is being written
def test_the_last_save_handles_signals_and_must_succeed(demo: Path, tmp_path: Path, every: int) -> None:
    """A launcher forwards SIGTERM to workers that have it already: it may come during the save."""

    def write_data(*_: Any) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        raise OSError(28, "No space left on device")

    config = two_step_config(demo, tmp_path / "run", checkpoint=CheckpointConfig(every=str(every)))
    with patch("clipscale.checkpoint.saving.ChecksumWriter.write_data", write_data), pytest.raises(UnwritableError):
        with_signal_at(CHUNKS + 3, lambda: train(config))


@pytest.mark.slow  # four runs
def test_a_run_from_anothers_checkpoint_goes_on_from_its_own_when_requeued(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    run = tmp_path / "run"
    path = tmp_path / "other/checkpoints/step_00000001"
    train(two_step_config(demo, other, checkpoint=CheckpointConfig(every="1")))
    assert with_signal_at(3, lambda: train(two_step_config(demo, run, resume=str(path)))) == signal.SIGTERM
    assert steps(run) == [1], "resume=auto would begin anew"
    train(two_step_config(demo, run, resume="auto"))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    train(two_step_config(demo, run, resume=str(path)))
    assert not [*run.glob("checkpoints/*.aside")], "the requeued job went back to the other run's checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2])
def test_a_signal_ends_an_evaluation(demo: Path, whole: list[float], tmp_path: Path, step: int) -> None:
    """One case is an evaluation between two steps, the other is the one at the end."""
    sets = EvalConfig(every=2 - step, sets=[str(demo / "objects")], limit=8, batch=4)
    config = two_step_config(demo, tmp_path / "run", eval=sets, checkpoint=CheckpointConfig(every="0"))
    assert with_signal_at(step * CHUNKS + 2, lambda: train(config)) == signal.SIGTERM
    assert steps(tmp_path / "run") == [step]
    assert train(config)["eval"], "a resumed run evaluates"
    assert curve(tmp_path / "run") == whole


def on_rank_1(rank: int, world_size: int, config: TrainConfig, call: int) -> int:
    return with_signal_at(call if rank == 1 else -1, lambda: train(config))


@pytest.mark.slow  # three runs of two ranks; the runs of waits/ leave together too
@pytest.mark.parametrize("parallel", ["ddp", "zero3"])
def test_all_ranks_leave_a_step_at_the_same_chunk(demo: Path, tmp_path: Path, parallel: str) -> None:
    launch = LaunchConfig(parallel=parallel)
    config = two_step_config(demo, tmp_path / "run", launch=launch)
    assert run_ranks(on_rank_1, 2, two_step_config(demo, tmp_path / "whole", launch=launch), -1) == [0, 0]
    assert run_ranks(on_rank_1, 2, config, CHUNKS // 2 + 7) == [signal.SIGTERM] * 2
    assert steps(tmp_path / "run") == [1]
    assert run_ranks(on_rank_1, 2, config, -1) == [0, 0]
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def votes_of(rank: int, world_size: int, calls: int, pause: float) -> tuple[int, int, float]:
    """How often ranks vote in so many calls of `poll`, the call at which a signal to rank 1 ends the work, and the
    seconds of the votes."""
    here = World(rank, world_size, torch.device("cpu"))
    poller = SignalPoller(here)
    votes = 0
    later = World.all_reduce_max_async

    def counted(self: World, *values: int) -> AsyncReduction:
        nonlocal votes
        votes += 1
        return later(self, *values)

    begun = time.monotonic()
    with patch.object(World, "all_reduce_max_async", counted):
        for call in range(2 * calls):
            if call == calls:
                before = votes
                seconds = time.monotonic() - begun
                poller.signum = signal.SIGTERM if rank == 1 else 0
            try:
                poller.poll()
            except SignalError:
                return before, call, seconds
            time.sleep(pause * (1 + rank))
    return before, 2 * calls, seconds


def test_ranks_vote_a_few_times_a_second_and_still_stop_together() -> None:
    """There are 200 short chunks in a second. Once each of them sent a message."""
    (votes, call, seconds), (*other, _) = run_ranks(votes_of, 2, 200, 0.004)
    assert other == [votes, call]
    assert 2 <= votes <= 6 + seconds / signal_poller.VOTE_S
    assert 200 < call <= 400
