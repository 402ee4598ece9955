"""What the end of a run's loop closes."""

import signal

import pytest

from clipscale.checkpoint.saving import UnwritableError
from clipscale.common.errors import LoaderError, UserError
from clipscale.lifecycle.early_end import closing_all, saving_completed_steps
from clipscale.lifecycle.stopping import SignalError


class Part:
    """A part of a run, which perhaps cannot be closed."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.is_closed = False

    def close(self) -> None:
        if self.error:
            raise self.error
        self.is_closed = True


def test_all_parts_are_closed_even_if_one_cannot_be() -> None:
    first, last = Part(), Part()
    with pytest.raises(OSError, match="no space"), closing_all(first, Part(OSError("no space")), last):
        pass
    assert first.is_closed and last.is_closed


class Unwritable:
    """A run whose disk is full."""

    step = 4

    def save_at_once(self) -> None:
        raise UnwritableError("checkpoint step_00000004 could not be written (No space left on device)")

    def can_save_after(self, error: UserError | OSError) -> bool:
        return True


def test_a_last_save_that_fails_does_not_hide_what_ended_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Its status tells a launcher whether to start again."""
    with pytest.raises(LoaderError, match="the storage is gone"), saving_completed_steps(Unwritable()):
        raise LoaderError("the storage is gone")
    with pytest.raises(UnwritableError), saving_completed_steps(Unwritable()):
        raise SignalError(signal.SIGTERM)
    assert capsys.readouterr().out.count("No space left") == 1
