"""Saves a run that ends early: by a signal, by an error, or because somebody has removed its folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.distributed.checkpoint import CheckpointException

from clipscale.common.errors import StoppedError, UserError, one_line
from clipscale.common.terminal import is_main_rank, log_warning
from clipscale.distributed.agreement import AgreedError, raise_on_all_ranks, run_on_rank0, unwrap_agreed
from clipscale.distributed.world import World
from clipscale.run.run_lock import FolderInUseError, RunLock
from clipscale.run.stopping import SignalError, stop_message

# What an evaluation between two steps raises if it runs out of memory. A step raises a UserError instead.
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


class Savable(Protocol):
    """A run that can save between two steps."""

    world: World
    # Completed steps.
    step: int

    @property
    def is_updating(self) -> bool:
        """Whether an update of the weights has begun and not ended."""

    def save_at_once(self) -> None:
        """Save the completed steps, and wait for that. A collective."""


def can_save_after(error: Exception, run: Savable) -> bool:
    """Whether the completed steps can be saved after an error in the run's loop: only if all of these hold.

    - Every rank raises it at the same place (AgreedError), because a save is a collective.
    - It did not interrupt an update: after half an update some weights are new and others old.
    - The folder is still this run's.

    A save also needs every rank's position in the data. If a rank does not know its own, `save_at_once` raises the
    loader's error on all ranks and saves nothing.
    """
    if isinstance(unwrap_agreed(error), FolderInUseError):
        return False
    return (run.world.size == 1 or isinstance(error, AgreedError)) and not run.is_updating


@contextmanager
def saving_on_early_end(run: Savable) -> Iterator[None]:
    """Context of a run's loop: saves the completed steps after a signal, and after most errors (`can_save_after`).

    After a signal, raises StoppedError, or what the save raises, such as UnwritableError. After an error, raises that
    error; if the save fails, too, that is only a warning.
    """
    try:
        yield
    except (UserError, OSError, *OUT_OF_MEMORY) as error:
        cause = unwrap_agreed(error)
        if isinstance(cause, SignalError):  # raised on all ranks
            run.save_at_once()
            raise StoppedError(early_end_message(cause.signum, run.step), cause.signum) from None
        if can_save_after(error, run):
            try:
                run.save_at_once()
            except (Exception, CheckpointException) as failure:  # the run still ends with the first error
                if is_main_rank() and str(failure) != str(error):
                    log_warning(f"the last completed steps are not saved ({one_line(failure)})")
        raise


@contextmanager
def stop_if_folder_removed(
    lock: RunLock | None, world: World, wait_for_save: Callable[[], None], step: int
) -> Iterator[None]:
    """Context of a save. If somebody has removed the run's folder, makes a new one, saves into it, and ends the run.

    `lock`: the folder's lock; None if nobody else uses the folder. `wait_for_save()` returns when the save is complete.
    `step`: the step that is saved.

    Raises UserError on every rank: after the save, or before the save if another run has begun in the folder.
    """
    if lock is None:
        yield
        return
    was_removed = run_on_rank0(world, lock.renew)
    yield
    if was_removed:
        wait_for_save()
        raise_on_all_ranks(
            UserError(
                f"run={lock.run_dir}: its folder was removed while it trained, with its records; a new one holds step "
                f"{step}: continue with resume=auto"
            )
        )


def early_end_message(signum: int, step: int) -> str:
    """The message of a run that a signal has ended."""
    return stop_message(signum) + (
        f" after step {step} and saved" if step else " before step 1 was complete: nothing is saved"
    )
