"""Worker processes of verbs that compute on all cores."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import TypeVar

from clipscale.common.errors import UserError
from clipscale.common.signals import blocked

T = TypeVar("T")


class _Worker(SpawnProcess):
    """A process of a pool. Signals do not reach it, such as a terminal's Ctrl-C: the caller handles them."""

    def start(self) -> None:
        with blocked():
            super().start()


class _Context(SpawnContext):
    """How a pool starts processes."""

    Process = _Worker


@contextmanager
def spawned_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of new processes, which end with this one, also if it is killed.

    They are spawned, because the caller may hold threads and locks. After an exception they are killed: nobody waits
    for what they compute. Raises UserError if one of them was killed by somebody else.
    """
    try:
        with ProcessPoolExecutor(processes, mp_context=_Context(), initializer=_end_with_parent) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in multiprocessing.active_children():
                    if isinstance(child, _Worker):
                        child.kill()
                raise
    except BrokenProcessPool as error:
        raise UserError(
            "one of the processes that compute was killed, perhaps because the machine ran out of memory; the same "
            "command continues"
        ) from error


def pool_map(pool: ProcessPoolExecutor, work: Callable[..., T], *arguments: Iterable[object]) -> Iterator[T]:
    """The results of `work`, in order, as of `map`.

    The pool's own `map` cancels the other calls when one fails. In Python 3.11 the pool's thread then ends with a
    traceback if it is reporting a killed process meanwhile.
    """
    futures = deque(pool.submit(work, *values) for values in zip(*arguments))
    while futures:
        yield futures.popleft().result()


def _end_with_parent() -> None:
    """Start a thread that ends this process with its parent.

    A worker that waits for work does not notice that end: it holds its pipe open itself.
    """
    threading.Thread(target=_wait_for_parents_end, daemon=True).start()


def _wait_for_parents_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
