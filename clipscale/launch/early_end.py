"""What a run saves that ends early: by a signal, or by an error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from clipscale.common.errors import StoppedError, UserError
from clipscale.launch.run_lock import FolderInUseError
from clipscale.launch.stopping import SignalError, stopped


class Closable(Protocol):
    def close(self) -> None: ...


class Savable(Protocol):
    """A run that can save between two steps."""

    # Completed steps.
    step: int

    def save_at_once(self) -> None:
        """Save the completed steps, and wait for that. A collective."""

    def can_save_after(self, error: UserError | OSError) -> bool:
        """Whether every rank comes here, and the weights are those of a completed step."""


@contextmanager
def saving_what_is_done(run: Savable) -> Iterator[None]:
    """Around a run's loop: saves the completed steps after a signal, and after an error where that is possible.

    Raises StoppedError after a signal.
    """
    try:
        yield
    except SignalError as signal:  # on all ranks
        run.save_at_once()
        raise StoppedError(stopped_after(signal.number, run.step), signal.number) from None
    except FolderInUseError:  # the folder is another run's now
        raise
    except (UserError, OSError) as error:
        if run.can_save_after(error):
            run.save_at_once()
        raise


@contextmanager
def closing(*parts: Closable) -> Iterator[None]:
    """Around a run's loop: closes its parts, one after another, however it ends."""
    try:
        yield
    finally:
        for part in parts:
            part.close()


def stopped_after(number: int, step: int) -> str:
    """The message of a run that a signal has ended."""
    return stopped(number) + (f" after step {step} and saved" if step else " in the first step: nothing is saved")
