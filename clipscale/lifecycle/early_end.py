"""Saves and closes a run that ends early: by a signal, by an error, or because somebody has removed its folder."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from clipscale.checkpoint.saving import UnwritableError
from clipscale.common.errors import StoppedError, UserError
from clipscale.common.terminal import is_main_rank, log_warning
from clipscale.distributed.agreement import run_on_rank0
from clipscale.distributed.world import World
from clipscale.lifecycle.run_lock import FolderInUseError, RunLock
from clipscale.lifecycle.stopping import SignalError, stop_message


class Closable(Protocol):
    def close(self) -> None: ...


class Savable(Protocol):
    """A run that can save between two steps."""

    # Completed steps.
    step: int

    def save_at_once(self) -> None:
        """Save the completed steps, and wait for that. A collective."""

    def can_save_after(self, error: UserError | OSError) -> bool:
        """Whether every rank comes here after this error, with the weights of a completed step."""


@contextmanager
def saving_completed_steps(run: Savable) -> Iterator[None]:
    """Around a run's loop: saves the completed steps after a signal, and after an error where that is possible.

    Raises StoppedError after a signal, and UnwritableError if a disk does not take the steps then. After an error that
    is a warning.
    """
    try:
        yield
    except SignalError as signal:  # raised on all ranks
        run.save_at_once()
        raise StoppedError(early_end_message(signal.number, run.step), signal.number) from None
    except FolderInUseError:  # the folder is another run's now
        raise
    except (UserError, OSError) as error:
        if run.can_save_after(error):
            try:
                run.save_at_once()
            except UnwritableError as unwritable:  # what ended the run stays its end
                if is_main_rank():
                    log_warning(str(unwritable))
        raise


@contextmanager
def ending_if_removed(
    lock: RunLock | None, world: World, wait_for_save: Callable[[], None], step: int
) -> Iterator[None]:
    """Around a save. If somebody has removed the run's folder, makes a new one, saves into it, and ends the run.

    `lock`: the folder's lock; None if nobody else uses the folder. `wait_for_save()` returns when the save is complete.
    `step`: the step that is saved.

    Raises UserError on every rank: after the save, or before the save if another run has begun in the folder.
    """
    if lock is None:
        yield
        return
    removed = run_on_rank0(world, lock.renew)
    yield
    if removed:
        wait_for_save()
        raise UserError(
            f"run={lock.folder}: its folder was removed while it trained, with its records; a new one holds step "
            f"{step}: go on with resume=auto"
        )


@contextmanager
def closing_all(*resources: Closable) -> Iterator[None]:
    """Around a run's loop: closes the run's parts, the first one first. All are closed, even if the loop or a `close`
    raises."""
    with ExitStack() as stack:
        for resource in reversed(resources):
            stack.callback(resource.close)
        yield


def early_end_message(number: int, step: int) -> str:
    """The message of a run that a signal has ended."""
    return stop_message(number) + (
        f" after step {step} and saved" if step else " before step 1 was complete: nothing is saved"
    )
