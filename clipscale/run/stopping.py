"""Ends work that has nothing to save, such as a start, when a signal comes. Imports no torch.

A loop, which has steps to save, ends by a `SignalPoller` (`signal_poller.py`).
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from types import FrameType

from clipscale.common.errors import StoppedError, UserError
from clipscale.common.signals import SIGNALS
from clipscale.common.terminal import is_main_rank

# A process may get one Ctrl-C twice, from the terminal and from the launcher. A repetition within this time is ignored.
SAME_CTRL_C_S = 1.0
# A start has this many seconds to run its signal handler in the main thread. Then another thread ends the process.
HANDLER_WITHIN_S = 1.0
# After the handler the main thread has this many seconds to leave its work.
LEAVE_WITHIN_S = 15.0
# After a signal a run saves, and then waits about this many seconds at most for the checkpoint's copy.
COPY_WITHIN_S = 60
# After a signal, workers have this many seconds to save and to copy. Then the launcher kills them. A save of more than
# 90 s leaves less time for the copy. torch 2.11 always gives workers 30 s.
SHUTDOWN_S = 90 + COPY_WITHIN_S


class SignalError(UserError):
    """All ranks leave their work at the same place, because of the signal `signum` to one of them."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"signal {signum}")
        self.signum = signum


def stop_message(signum: int) -> str:
    """The beginning of the line about a run that a signal has ended."""
    return "stopped" if signum == signal.SIGINT else f"stopped by {signal.Signals(signum).name}"


def effective_signal(signum: int) -> int:
    """SIGTERM for SIGUSR1, Slurm's usual warning: both end with the same exit status. Any other signal itself."""
    return int(signal.SIGTERM) if signum == signal.SIGUSR1 else signum


@contextmanager
def exit_on_signal(suffix: str = "") -> Iterator[None]:
    """Context of work that has nothing to save, such as a start: a signal ends it by StoppedError.

    After the first signal:
    -  0 s: the handler interrupts the main thread, and StoppedError leaves this context;
    -  1 s: the handler has not run, as in a collective or a library's wait: another thread ends the process;
    - 15 s: the handler has run, but the main thread is still in the work: another thread ends the process.

    Later signals of schedulers and launchers change nothing. But a later Ctrl-C raises KeyboardInterrupt.
    `suffix`: the end of the line about the signal.
    """
    first_signal = _FirstSignal(suffix)
    with handling_signals(first_signal.interrupt_work, first_signal.end_if_stuck):
        try:
            first_signal.begin_work()
            yield
        except BaseException as error:  # a library's own, or the loss of a rank that ended earlier
            if not first_signal.signum:
                raise
            raise stop_in_context(error) or StoppedError(first_signal.message(), first_signal.signum) from None
        finally:
            first_signal.end_work()
    if first_signal.signum:  # the signal came after the work had ended
        raise StoppedError(first_signal.message(), first_signal.signum)


class _FirstSignal:
    """The first signal during the work inside `exit_on_signal`, and what it does to that work."""

    def __init__(self, suffix: str) -> None:
        # 0: none has come.
        self.signum = 0
        self.work_has_ended = Event()
        # Outside the work, while handlers are set and restored, a signal is only recorded.
        self._interrupts = False
        self._suffix = suffix
        self._came_at = 0.0
        self._handler_ran = Event()

    def message(self) -> str:
        """The line about the signal, for the user."""
        return stop_message(self.signum) + self._suffix

    def begin_work(self) -> None:
        """From here on, a signal interrupts the work. Raises KeyboardInterrupt if one has come."""
        self._interrupts = True
        if self.signum:
            raise KeyboardInterrupt

    def end_work(self) -> None:
        """From here on, a signal is only recorded."""
        self._interrupts = False
        self.work_has_ended.set()

    def interrupt_work(self, signum: int, _: object) -> None:
        """Raise KeyboardInterrupt at the first signal, and at a later Ctrl-C. The main thread runs it."""
        now = time.monotonic()
        is_first = self.signum == 0
        if is_first:
            self.signum = effective_signal(signum)
            self._came_at = now
        self._handler_ran.set()
        is_later_ctrl_c = signum == signal.SIGINT and now - self._came_at > SAME_CTRL_C_S
        if self._interrupts and (is_first or is_later_ctrl_c):
            raise KeyboardInterrupt

    def end_if_stuck(self, signum: int) -> None:
        """End the process if the main thread does not leave its work in time. A thread of its own runs it."""
        if self._handler_ran.wait(HANDLER_WITHIN_S) and self.work_has_ended.wait(LEAVE_WITHIN_S):
            return
        self.signum = self.signum or effective_signal(signum)
        if is_main_rank() and multiprocessing.parent_process() is None:  # `launch.local` prints for its workers
            with suppress(OSError):
                os.write(2, f"{self.message()}\n".encode())
        os._exit(128 + self.signum)


# Set once a signal has come to work that handles signals.
_received = Event()


def has_received_signal() -> bool:
    """Whether a signal has come to work of this process that handles signals."""
    return _received.is_set()


def stop_in_context(error: BaseException | None) -> StoppedError | None:
    """The StoppedError in the context of `error`, or None.

    If there is one, the run had stopped and saved, and `error` came while it was closing.
    """
    while error:
        if isinstance(error, StoppedError):
            return error
        error = error.__context__
    return None


@contextmanager
def handling_signals(
    handler: Callable[[int, FrameType | None], None], listener: Callable[[int], None]
) -> Iterator[None]:
    """Handle SIGNALS. SIGHUP stays ignored where it is (nohup).

    `handler` runs in the main thread, once that thread runs Python again. While the main thread waits in a collective,
    no handler runs. `listener(signum)` runs at once, in a thread of its own.
    """
    before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    outer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def listen() -> None:
        while data := os.read(reader, 1):
            if data[0] in before:
                _received.set()
                listener(data[0])

    thread = Thread(target=listen, name="signals", daemon=True)
    thread.start()
    try:
        for signum in SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                before[signum] = signal.signal(signum, handler)
        yield
    finally:
        signal.set_wakeup_fd(outer)
        for handled, earlier in before.items():
            signal.signal(handled, earlier)
        os.close(writer)
        thread.join()
        os.close(reader)
