"""Ends a run at a signal, between two chunks of a step or two batches of an evaluation."""

import math
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from clipscale.distributed.world import AsyncReduction, World

# A second Ctrl-C within this time is the same one: the terminal sends it to the launcher and the workers, and the
# launcher forwards it.
AGAIN_S = 1.0
WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Ranks tell each other of signals about so often. A message takes 25 to 50 ms over 512 ranks.
VOTE_S = 0.25
# Calls of `check` between two votes, at most.
MOST_CALLS = 256


@dataclass
class SignalError(Exception):
    """All ranks leave their work at the same place, because of the signal `number` to one of them."""

    number: int


class Stop:
    """Records a scheduler's warning or Ctrl-C; `check` then leaves the work, so that the run can save.

    Warnings are SIGTERM, SIGUSR1, which Slurm's users choose for it and which counts as SIGTERM, so the run ends with
    the same status, and SIGHUP of a terminal that is closed, unless the run was started to ignore it (nohup). A later
    Ctrl-C raises KeyboardInterrupt. Works in the main thread only.
    """

    def __init__(self, world: World) -> None:
        """Rank 0 prints what a first Ctrl-C does."""
        # The signal that came; 0: none.
        self.number = 0
        self._world, self._first = world, 0.0
        self._before: dict[int, Any] = {}
        self._votes: AsyncReduction | None = None
        # From the last vote to the next, as all ranks agree.
        self._calls = 1
        # Calls to the next vote.
        self._left = 1
        self._voted = time.monotonic()

    def __enter__(self) -> None:
        for number in WARNINGS + (signal.SIGINT,):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._record)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise SignalError on all ranks at once, if a signal has come to any. Every rank calls it equally often.

        Ranks vote a few times a second, and learn of each other's signals at the next vote, so that no rank waits for
        the slowest.
        """
        number = self.number
        if self._world.size > 1:
            self._left -= 1
            number = 0 if self._left else self._vote()
        if number:
            raise SignalError(number)

    def restart(self) -> None:
        """Vote at the next calls, whose work may take longer. Every rank calls it at the same place."""
        self._calls = 0
        self._left = 1

    def _vote(self) -> int:
        """The highest number of all ranks' signals at the last vote. Begins the next, which also sets when it ends."""
        now = time.monotonic()
        calls_per_vote = max(1, math.ceil(VOTE_S * self._calls / max(now - self._voted, 1e-6)))
        votes = self._votes.values() if self._votes else [0, -1]
        self._calls = -votes[1] if self._calls else 1
        self._left = self._calls
        self._voted = now
        # The rank with the fewest calls decides.
        self._votes = self._world.all_reduce_max_async(self.number, -min(calls_per_vote, MOST_CALLS))
        return votes[0]

    def _record(self, number: int, _: object) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self.number and now - self._first > AGAIN_S:
            raise KeyboardInterrupt
        if not self.number:
            self._first = now
            if self._world.is_rank0 and number == signal.SIGINT:
                with suppress(OSError):
                    os.write(2, b"\nsaving and ending; Ctrl-C again ends the run at once\n")
        self.number = signal.SIGTERM if number == signal.SIGUSR1 else number
