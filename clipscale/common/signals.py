"""Keeps signals to a whole job away from helper processes, which their parents end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

# Ctrl-C, a terminal that is closed, and what schedulers send to all processes of a job: the processes of the ranks
# handle them.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@contextmanager
def blocked() -> Iterator[None]:
    """Processes that are started in here never receive SIGNALS; this process receives them afterwards.

    multiprocessing's resource tracker is one of them. Where a signal ended it, the semaphores that it tracks could not
    be removed.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    resource_tracker.ensure_running()  # lifts the block from SIGINT and SIGTERM in this process
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
