"""After which errors a run saves."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from clipscale.checkpoint.saving import UnwritableError
from clipscale.common.errors import LoaderError, StoppedError, UserError
from clipscale.distributed.agreement import AgreedError, raise_on_all_ranks
from clipscale.distributed.world import World
from clipscale.run.early_end import can_save_after, saving_on_early_end, stop_if_folder_removed
from clipscale.run.run_lock import FolderInUseError
from clipscale.run.stopping import SignalError
from tests.support.user_errors import refused


class Run:
    """A run on so many ranks, after its fourth step."""

    step = 4

    def __init__(self, ranks: int = 1, *, is_updating: bool = False) -> None:
        self.world = World(0, ranks, torch.device("cpu"))
        self.is_updating = is_updating
        self.is_saved = False

    def save_at_once(self) -> None:
        self.is_saved = True


@pytest.mark.parametrize("agreed", [False, True])
def test_a_run_saves_after_a_signal(agreed: bool) -> None:
    """A signal that comes while one rank waits for samples is agreed on later, as the failure of its stream."""
    run = Run(2)
    signalled = SignalError(signal.SIGTERM)
    with pytest.raises(StoppedError, match="stopped by SIGTERM after step 4 and saved"), saving_on_early_end(run):
        raise shared(signalled) if agreed else signalled
    assert run.is_saved


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OSError("no space")])
def test_a_run_saves_if_an_evaluation_finds_no_memory(error: Exception) -> None:
    """The error remains the run's end."""
    run = Run()
    with pytest.raises(type(error)), saving_on_early_end(run):
        raise error
    assert run.is_saved


class Unwritable(Run):
    """A run whose last save fails."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__()
        self.failure = failure

    def save_at_once(self) -> None:
        raise self.failure


def shared(error: UserError) -> AgreedError:
    """An error that is raised on all ranks."""
    with pytest.raises(AgreedError) as raised:
        raise_on_all_ranks(error)
    return raised.value


@pytest.mark.parametrize(
    ("error", "run", "can_save"),
    [
        (shared(UserError("a mistake")), Run(2), True),
        (UserError("a mistake"), Run(2), False),
        (OSError("no space"), Run(2), False),
        (UserError("a mistake"), Run(), True),
        (OSError("no space"), Run(), True),
        (shared(UserError("a mistake")), Run(2, is_updating=True), False),
        (OSError("no space"), Run(is_updating=True), False),
        (shared(FolderInUseError("run=it is in use")), Run(2), False),
    ],
)
def test_a_run_saves_after_an_error_of_all_ranks_between_updates(error: Exception, run: Run, can_save: bool) -> None:
    assert can_save_after(error, run) == can_save


def test_the_end_of_a_removed_folder_is_on_all_ranks(tmp_path: Path) -> None:
    """Each of them then waits for the checkpoint's copy."""
    lock: Any = SimpleNamespace(run_dir=tmp_path, renew=lambda: True)
    run = Run()
    with (
        refused("its folder was removed") as ended,
        stop_if_folder_removed(lock, run.world, lambda: None, run.step),
    ):
        pass
    assert can_save_after(ended.value, Run(2))


@pytest.mark.parametrize(
    "failure",
    [
        UnwritableError("checkpoint step_00000004 could not be written (No space left on device)"),
        CheckpointException("write", {1: (RuntimeError("No space left"), None)}),  # type: ignore[dict-item]
        RuntimeError("No space left"),
        OSError("No space left"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_a_last_save_that_fails_does_not_hide_what_ended_the_run(
    failure: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its status tells a launcher whether to start again."""
    with pytest.raises(LoaderError, match="the storage is gone"), saving_on_early_end(Unwritable(failure)):
        raise LoaderError("the storage is gone")
    with pytest.raises(type(failure)), saving_on_early_end(Unwritable(failure)):
        raise SignalError(signal.SIGTERM)
    assert capsys.readouterr().out.count("No space left") == 1
