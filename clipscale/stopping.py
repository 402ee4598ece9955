"""Stops a run at a signal, after its current step."""

import math
import os
import signal
import time
from typing import Any

AGAIN_S = 1.0
"""A second Ctrl-C within this time is the same one: the terminal sends it to the launcher and the workers, and the launcher forwards it."""
WARNINGS = (signal.SIGTERM, signal.SIGUSR1)


class Stop:
    """A context in which a scheduler's warning and Ctrl-C are only recorded, so that the loop can end its step and save.

    Warnings are SIGTERM and SIGUSR1, which Slurm's users choose for it. Both count as SIGTERM, so the run ends with the same status.
    A later Ctrl-C raises KeyboardInterrupt. Works in the main thread only.
    """

    def __init__(self, *, announce: bool) -> None:
        """`announce`: print what a first Ctrl-C does."""
        self.number = 0
        """The signal that came; 0: none."""
        self._announce, self._first = announce, math.inf
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._record) for number in WARNINGS + (signal.SIGINT,)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, _: object) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._first > AGAIN_S:
            raise KeyboardInterrupt
        if self._announce and not self.number and number == signal.SIGINT:
            os.write(2, b"\nfinishing the step and saving; Ctrl-C again ends the run at once\n")
        self.number, self._first = signal.SIGTERM if number in WARNINGS else number, min(self._first, now)
