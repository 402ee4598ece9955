"""Worker processes of verbs that compute on all cores."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from clipscale.common.errors import UserError


@contextmanager
def spawned_pool(processes: int, initializer: Callable[[], object] | None = None) -> Iterator[ProcessPoolExecutor]:
    """A pool of new processes, which end with this one, also if it is killed.

    They are spawned, because the caller may hold threads and locks. Each calls `initializer` at its start. Raises
    UserError if one of them was killed.
    """
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(
            processes, mp_context=context, initializer=_start_worker, initargs=(initializer,)
        ) as pool:
            yield pool
    except BrokenProcessPool as error:
        raise UserError(
            "one of the processes that compute was killed, perhaps because the machine ran out of memory; the same "
            "command continues"
        ) from error


def _start_worker(initializer: Callable[[], object] | None) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if initializer:
        initializer()


def _end_with_parent() -> None:
    """Wait for the end of the parent. A worker that waits for work holds its pipe open itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
