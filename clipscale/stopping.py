"""Stopping a run by a signal without losing its step."""

import math
import os
import signal
import time
from typing import Any

AGAIN_S = 1.0
"""A Ctrl-C that comes sooner is the same one: a terminal sends it to the launcher and its workers, and the launcher passes it on."""


class Stop:
    """Within it, SIGTERM (a scheduler's warning) and Ctrl-C are only noted, for the loop to end its step and save.

    A later Ctrl-C raises KeyboardInterrupt. For the main thread.
    """

    def __init__(self, *, tells: bool) -> None:
        """`tells`: say what a first Ctrl-C does."""
        self.number = 0
        """Of the signal that came; 0: none did."""
        self._tells, self._first = tells, math.inf
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._first > AGAIN_S:
            raise KeyboardInterrupt
        if self._tells and not self.number and number == signal.SIGINT:
            os.write(2, b"\nfinishing the step and saving; Ctrl-C again ends the run at once\n")
        self.number, self._first = number, min(self._first, now)
