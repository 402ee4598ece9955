"""Lets all ranks act on a signal before the same chunk of a step, or in the same wait."""

import math
import os
import signal
import time
from contextlib import ExitStack, suppress

from clipscale.distributed.world import AsyncReduction, World
from clipscale.run.stopping import SAME_CTRL_C_S, SignalError, effective_signal, handling_signals

# Seconds between two votes of the ranks. A message takes 25 to 50 ms over 512 ranks.
VOTE_S = 0.25
# Calls of `poll` between two votes, at most.
MAX_CALLS = 256
# A rank that waits asks this often, in seconds, whether another rank has a signal.
ASK_EVERY_S = 0.5


def next_interval(elapsed: float, calls: int) -> int:
    """How many calls of `poll` take VOTE_S, given that `calls` of them took `elapsed` seconds; 1 to MAX_CALLS."""
    calls_per_vote = math.ceil(VOTE_S * calls / max(elapsed, 1e-6))
    return min(max(1, calls_per_vote), MAX_CALLS)


class SignalPoller:
    """Records a scheduler's warning or Ctrl-C. A later call of `poll` then raises SignalError, the same call on all
    ranks, so that the run can save. With one process it is the next call.

    Warnings are SIGTERM, SIGUSR1 and SIGHUP. A closed terminal sends SIGHUP; a run started by nohup ignores it. A later
    Ctrl-C raises KeyboardInterrupt. Works in the main thread only.
    """

    def __init__(self, world: World) -> None:
        # The last signal; 0: none has come.
        self.signum = 0
        self._world = world
        self._came_at = 0.0
        # The last vote, if any, and the time when it began. A rank sends its last signal and proposes an interval. The
        # highest signal and the lowest interval are the outcome.
        self._vote: AsyncReduction | None = None
        self._voted_at = time.monotonic()
        # Calls of `poll` between the last vote and the next one, and how many of them are left.
        self._interval = 1
        self._calls_left = 1
        # When this rank, waiting, last asked whether another one has a signal.
        self._asked_at = self._voted_at
        self._handlers = ExitStack()

    def __enter__(self) -> None:
        self._handlers.enter_context(
            handling_signals(self._record, lambda signum: self._world.signals.publish(effective_signal(signum)))
        )

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    def poll(self, *, every_call: bool = False) -> None:
        """Raise SignalError on all ranks at once, if a signal has come to any. All ranks call it equally often.

        The ranks vote a few times a second. No rank waits for the slowest, because a vote is read one vote later:
        - call k: begin vote A, an all-reduce of signals and intervals;
        - the `interval` - 1 calls after it: only count;
        - call k + interval: read vote A, raise if it has a signal, and begin vote B. A's outcome is the new interval.

        `every_call`: vote at each call, for calls that are far apart, such as between batches of an evaluation.
        """
        signum = self.signum
        if self._world.size > 1:
            signum = self._poll_ranks(every_call)
        if signum:
            raise SignalError(signum)

    def poll_while_waiting(self) -> None:
        """Raise SignalError if a signal has come to this rank, or to another that may be waiting for this one.

        A rank that waits outside collectives calls it a few times a second. With several ranks the caller catches the
        error and goes on to its calls of `poll`, one of which then raises on all ranks.
        """
        now = time.monotonic()
        if not self.signum and now - self._asked_at > ASK_EVERY_S:
            self._asked_at = now
            self.signum = self._world.signals.latest()
        if self.signum:
            raise SignalError(self.signum)

    def _poll_ranks(self, every_call: bool) -> int:
        """Read the last vote and begin another, if that is due. Returns the signal of the vote that was read, or 0."""
        self._calls_left -= 1
        if self._calls_left > 0 and not every_call:
            return 0
        now = time.monotonic()
        proposed = 1 if every_call else next_interval(now - self._voted_at, self._interval)
        signum, negated_interval = self._vote.values() if self._vote else (0, -1)
        # The reduction is a maximum. The interval is sent negated, so that the lowest one wins.
        self._vote = self._world.all_reduce_max_async(self.signum, -proposed)
        self._voted_at = now
        self._interval = 1 if every_call else -negated_interval
        self._calls_left = self._interval
        return signum

    def _record(self, signum: int, _: object) -> None:
        """Record a signal. At the first Ctrl-C, rank 0 says that the run saves and ends."""
        now = time.monotonic()
        if signum == signal.SIGINT and self.signum and now - self._came_at > SAME_CTRL_C_S:
            raise KeyboardInterrupt
        if not self.signum:
            self._came_at = now
            if self._world.is_rank0 and signum == signal.SIGINT:
                with suppress(OSError):
                    os.write(2, b"\nsaving and ending; Ctrl-C again ends the run at once\n")
        self.signum = effective_signal(signum)
