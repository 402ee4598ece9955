"""The signals that end a run, how work asks for them, and how they are kept away from helper processes."""

import ctypes
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

# Ctrl-C, a closed terminal, and the signals that schedulers send to all processes of a job. Each ends a run. The ranks
# handle them.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# A poll: a function that is called between two units of work, or during a wait. It may raise, to end it.
Poll = Callable[[], None]
# prctl's option number on Linux.
PR_SET_PDEATHSIG = 1


def no_poll() -> None:
    """A poll that does nothing."""


def set_signal_of_parents_end(signum: int) -> None:
    """Ask the kernel to send this process the signal when the thread that started it ends; 0: none."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signum), 0, 0, 0)


@contextmanager
def blocked() -> Iterator[None]:
    """Processes that are started inside never receive SIGNALS: their parent ends them. This process receives them
    afterwards.

    multiprocessing's resource tracker is started inside: if a signal ended it, nobody would remove the semaphores that
    it tracks.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    resource_tracker.ensure_running()  # lifts the block from SIGINT and SIGTERM in this process
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
