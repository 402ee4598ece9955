"""Polls: functions that are called between two units of work, or during a wait. They may raise to end it."""

from collections.abc import Callable

Poll = Callable[[], None]


def no_poll() -> None:
    """A poll that does nothing."""
