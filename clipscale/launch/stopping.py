"""Ends a run at a signal. Imports no torch.

Where nothing is to be saved, the run ends at once. Otherwise it ends between two chunks of a step, between two batches
of an evaluation, or where this process waits.
"""

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from clipscale.common.errors import StoppedError, UserError
from clipscale.common.terminal import main_rank

if TYPE_CHECKING:
    from clipscale.distributed.world import AsyncReduction, World

# A second Ctrl-C within this time is the same one: the terminal sends it to the launcher and the workers, and the
# launcher forwards it.
SAME_CTRL_C_S = 1.0
# Signals that ask a run to end.
WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Ranks tell each other of signals about so often. A message takes 25 to 50 ms over 512 ranks.
VOTE_S = 0.25
# Calls of `check` between two votes, at most.
MAX_CALLS = 256
# A rank that waits asks this often, in seconds, whether another rank has a signal.
ASK_S = 0.5
# A start has this many seconds to run its signal handler in the main thread. Then another thread ends the process.
HANDLER_S = 1.0
# After the handler the main thread has this many seconds to leave its work.
LEAVE_S = 15.0


class SignalError(UserError):
    """All ranks leave their work at the same place, because of the signal `number` to one of them."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


def stop_message(number: int) -> str:
    """The beginning of the line about a run that a signal has ended."""
    return "stopped" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"


def effective_signal(number: int) -> int:
    """SIGTERM for SIGUSR1, which Slurm's users choose for a warning: a run then ends with the same status."""
    return int(signal.SIGTERM) if number == signal.SIGUSR1 else number


# Whether `interrupt` has asked the main thread to leave its work.
_interrupted = Event()


@contextmanager
def interruptible() -> Iterator[None]:
    """Around work that another thread may `interrupt`. An interrupt that comes too late does not reach later work."""
    try:
        yield
    finally:
        _interrupted.clear()


def interrupt() -> None:
    """Interrupt the main thread, as Ctrl-C does.

    The signal alone may be lost: a background shell ignores SIGINT, and an import may swallow it. So the interrupt is
    also noted, and work that begins to handle signals looks at the note.
    """
    _interrupted.set()
    os.kill(os.getpid(), signal.SIGINT)


def check_interrupted() -> None:
    """Raise KeyboardInterrupt if there was an `interrupt`. For work that handles signals in another way."""
    if _interrupted.is_set():
        raise KeyboardInterrupt


def stop_in_context(error: BaseException | None) -> StoppedError | None:
    """The StoppedError in the context of `error`: the run had stopped and saved, and was interrupted while it closed.
    None: there is none.
    """
    while error:
        if isinstance(error, StoppedError):
            return error
        error = error.__context__
    return None


@contextmanager
def _handling_signals(
    handler: Callable[[int, FrameType | None], None], listener: Callable[[int], None]
) -> Iterator[None]:
    """Handle Ctrl-C and WARNINGS. SIGHUP stays ignored where it is (nohup).

    `handler` runs in the main thread, as soon as that runs Python. While it waits in a collective, no handler runs. So
    `listener(number)` runs at once, in a thread of its own.
    """
    before: dict[int, Any] = {}
    for number in (*WARNINGS, signal.SIGINT):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    outer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def listen() -> None:
        while data := os.read(reader, 1):
            if data[0] in before:
                listener(data[0])

    thread = Thread(target=listen, name="signals", daemon=True)
    thread.start()
    try:
        if _interrupted.is_set():
            handler(signal.SIGINT, None)
        yield
    finally:
        signal.set_wakeup_fd(outer)
        for handled, earlier in before.items():
            signal.signal(handled, earlier)
        os.close(writer)
        thread.join()
        os.close(reader)


class StopAtOnce:
    """Around work of which nothing is to be saved, such as a start: a signal ends it at once, by StoppedError.

    Where the main thread cannot handle the signal, as in a collective or a library's wait, another thread ends the
    process. Further signals, as schedulers and launchers send them, change nothing. But a later Ctrl-C raises
    KeyboardInterrupt.
    """

    def __init__(self, suffix: str = "") -> None:
        """`suffix`: the end of the line about the signal."""
        self._suffix = suffix
        # The first signal; 0: none has come.
        self._number = 0
        self._came_at = 0.0
        self._handler_ran = Event()
        self._ended = Event()

    def __enter__(self) -> None:
        self._handling = _handling_signals(self._leave, self._end_if_stuck)
        self._handling.__enter__()

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._handling.__exit__(None, None, None)
        if self._number and error:  # of any kind: a library's own, or the loss of a rank that ended earlier
            raise stop_in_context(error) or StoppedError(self._line(), self._number) from None

    def _line(self) -> str:
        return stop_message(self._number) + self._suffix

    def _leave(self, number: int, _: object) -> None:
        """The handler: the first signal and a second Ctrl-C interrupt the work."""
        now = time.monotonic()
        is_first = self._number == 0
        if is_first:
            self._number = effective_signal(number)
            self._came_at = now
        self._handler_ran.set()
        if is_first or (number == signal.SIGINT and now - self._came_at > SAME_CTRL_C_S):
            raise KeyboardInterrupt

    def _end_if_stuck(self, number: int) -> None:
        """The listener: ends the process if the main thread does not leave its work in time."""
        if self._handler_ran.wait(HANDLER_S) and self._ended.wait(LEAVE_S):
            return
        self._number = self._number or effective_signal(number)
        if main_rank() and multiprocessing.parent_process() is None:  # `launch.local` prints for its workers
            with suppress(OSError):
                os.write(2, f"{self._line()}\n".encode())
        os._exit(128 + self._number)


class Stop:
    """Records a scheduler's warning or Ctrl-C; `check` then leaves the work, so that the run can save.

    Warnings are SIGTERM, SIGUSR1, and SIGHUP of a terminal that is closed, unless the run was started to ignore it. A
    later Ctrl-C raises KeyboardInterrupt. Works in the main thread only.
    """

    def __init__(self, world: "World") -> None:
        """Rank 0 prints what a first Ctrl-C does."""
        # The last signal; 0: none has come.
        self.number = 0
        self._world = world
        self._came_at = 0.0
        self._votes: AsyncReduction | None = None
        # Calls of `check` from the last vote to the next, as all ranks agree.
        self._calls = 1
        # Calls to the next vote.
        self._calls_to_vote = 1
        self._voted = self._asked = time.monotonic()

    def __enter__(self) -> None:
        self._handling = _handling_signals(
            self._record, lambda number: self._world.leave_signal(effective_signal(number))
        )
        self._handling.__enter__()

    def __exit__(self, *_: object) -> None:
        self._handling.__exit__(None, None, None)

    def check(self) -> None:
        """Raise SignalError on all ranks at once, if a signal has come to any. Every rank calls it equally often.

        Ranks vote a few times a second, and learn of each other's signals at the next vote, so that no rank waits for
        the slowest.
        """
        number = self.number
        if self._world.size > 1:
            self._calls_to_vote -= 1
            number = 0 if self._calls_to_vote else self._vote()
        if number:
            raise SignalError(number)

    def check_alone(self) -> None:
        """Raise SignalError if a signal has come to this rank, or to another that may be waiting for this one.

        A rank calls it a few times a second while it waits for something that the others do not know of. With several
        ranks the caller goes on to the next `check`, which then raises on all.
        """
        now = time.monotonic()
        if not self.number and now - self._asked > ASK_S:
            self._asked = now
            self.number = self._world.left_signal()
        if self.number:
            raise SignalError(self.number)

    def vote_and_check(self) -> None:
        """`check` with a vote at each call, for work that is long: the batches of an evaluation."""
        self._calls = 0
        self._calls_to_vote = 1
        self.check()

    def _vote(self) -> int:
        """The highest number of all ranks' signals at the last vote. Begins the next vote.

        The ranks also agree in it after how many calls it ends.
        """
        now = time.monotonic()
        calls_per_vote = max(1, math.ceil(VOTE_S * self._calls / max(now - self._voted, 1e-6)))
        votes = self._votes.values() if self._votes else [0, -1]
        self._calls = -votes[1] if self._calls else 1
        self._calls_to_vote = self._calls
        self._voted = now
        # The rank with the fewest calls decides.
        self._votes = self._world.all_reduce_max_async(self.number, -min(calls_per_vote, MAX_CALLS))
        return votes[0]

    def _record(self, number: int, _: object) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self.number and now - self._came_at > SAME_CTRL_C_S:
            raise KeyboardInterrupt
        if not self.number:
            self._came_at = now
            if self._world.is_rank0 and number == signal.SIGINT:
                with suppress(OSError):
                    os.write(2, b"\nsaving and ending; Ctrl-C again ends the run at once\n")
        self.number = effective_signal(number)
