"""Ends a run at a signal, between two chunks of a step or two batches of an evaluation."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from clipscale.distributed.world import Later, World

AGAIN_S = 1.0
"""A second Ctrl-C within this time is the same one: the terminal sends it to the launcher and the workers, and the
launcher forwards it.
"""
WARNINGS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass
class SignalError(Exception):
    """All ranks leave their work at the same place, because of the signal `number` to one of them."""

    number: int


class Stop:
    """Records a scheduler's warning or Ctrl-C; `check` then leaves the work, so that the run can save.

    Warnings are SIGTERM and SIGUSR1, which Slurm's users choose for it. Both count as SIGTERM, so the run ends with the
    same status. A later Ctrl-C raises KeyboardInterrupt. Works in the main thread only.
    """

    def __init__(self, world: World) -> None:
        """Rank 0 prints what a first Ctrl-C does."""
        self.number = 0
        """The signal that came; 0: none."""
        self._world, self._first = world, 0.0
        self._before: dict[int, Any] = {}
        self._votes: Later | None = None

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._record) for number in WARNINGS + (signal.SIGINT,)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise SignalError on all ranks at once, if a signal has come to any. Every rank calls it equally often.

        Ranks learn of each other's signals one call later, so that no rank waits for the slowest.
        """
        number = self.number
        if self._world.size > 1:
            votes, self._votes = self._votes, self._world.highest_later(number)
            number = votes.values()[0] if votes else 0
        if number:
            raise SignalError(number)

    def _record(self, number: int, _: object) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self.number and now - self._first > AGAIN_S:
            raise KeyboardInterrupt
        if not self.number:
            self._first = now
            if self._world.main and number == signal.SIGINT:
                os.write(2, b"\nsaving and ending; Ctrl-C again ends the run at once\n")
        self.number = signal.SIGTERM if number in WARNINGS else number
