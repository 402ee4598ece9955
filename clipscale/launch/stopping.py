"""Stops a run at a signal: after its current step, or in the midst of it where the step would outlive the scheduler's
grace.
"""

import os
import signal
import time
from typing import Any

from clipscale.distributed.world import Later, World

AGAIN_S = 1.0
"""A second Ctrl-C within this time is the same one: the terminal sends it to the launcher and the workers, and the
launcher forwards it.
"""
TERMINAL_S = 5.0
"""Grace after a Ctrl-C, in seconds. A user waits for it."""
WARNINGS = (signal.SIGTERM, signal.SIGUSR1)


class AbandonedError(Exception):
    """All ranks have left a step or an evaluation at the same place, because of a signal to one of them."""


class Stop:
    """A context in which a scheduler's warning and Ctrl-C are only recorded, so that the loop can save.

    Warnings are SIGTERM and SIGUSR1, which Slurm's users choose for it. Both count as SIGTERM, so the run ends with the
    same status. A later Ctrl-C raises KeyboardInterrupt. Works in the main thread only.
    """

    def __init__(self, world: World, grace_s: float) -> None:
        """`grace_s`: seconds from a signal to the end of the process. Rank 0 prints what a first Ctrl-C does."""
        self.number = 0
        """The signal that came; 0: none."""
        self.save_s = 0.0
        """What the last save took; 0: not measured, so half of the grace is left for it."""
        self._world, self._grace_s = world, grace_s
        self._first = 0.0
        self._before: dict[int, Any] = {}
        self._ends = 0.0
        self._votes: Later | None = None

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._record) for number in WARNINGS + (signal.SIGINT,)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def begin(self, expected_s: float) -> None:
        """Work begins that takes about `expected_s` seconds; 0: not known."""
        self._ends = time.monotonic() + expected_s

    def check(self) -> None:
        """Leave the work where it cannot end in time. Every rank calls it equally often, between two pieces of the
        work.

        Ranks learn each other's vote one call later, so that no rank waits for the slowest. Raises AbandonedError, on
        all ranks at once.
        """
        vote = int(self.late())
        if self._world.size > 1:
            votes, self._votes = self._votes, self._world.highest_later(vote)
            vote = votes.values()[0] if votes else 0
        if vote:
            raise AbandonedError

    def late(self) -> bool:
        """Whether a signal has come and the grace ends before the work and a save do."""
        if not self.number:
            return False
        grace = min(self._grace_s, TERMINAL_S) if self.number == signal.SIGINT else self._grace_s
        save = 2 * self.save_s or grace / 2  # one that takes twice as long as the last one still fits
        return max(time.monotonic(), self._ends) > self._first + grace - save

    def _record(self, number: int, _: object) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self.number and now - self._first > AGAIN_S:
            raise KeyboardInterrupt
        if not self.number:
            self._first = now
            if self._world.main and number == signal.SIGINT:
                os.write(2, b"\nsaving and ending; Ctrl-C again ends the run at once\n")
        self.number = signal.SIGTERM if number in WARNINGS else number
