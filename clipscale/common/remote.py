"""Requests to a server: their time limit, and a line about the wait.

The limit is this program's own: the libraries behind fsspec try for minutes, each in its own way.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import Thread, Timer
from typing import TypeVar

from clipscale.common.terminal import is_main_rank, log_line

T = TypeVar("T")

# Seconds in which a server answers a small request.
ANSWER_S = 60.0
# The time limit of a large request allows for at least this speed.
MIN_BYTES_PER_S = 1 << 20
# After this many seconds a line says what is waited for.
ANNOUNCE_S = 10.0
# Seconds between two looks at the progress of a request.
LOOK_S = 1.0


def within_time(
    work: Callable[[], T],
    awaited: str,
    limit_s: float,
    *,
    progress: Callable[[], float] = lambda: 0.0,
    announce: bool = True,
) -> T:
    """Run `work` in a thread, which is abandoned after `limit_s` without `progress`. Returns what `work` returns.

    `announce`: after ANNOUNCE_S a line says that `awaited` is waited for. Raises what `work` raises, and TimeoutError.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    started_at = time.monotonic()
    progressed_at = started_at
    last = progress()
    while not wait([future], LOOK_S).done:
        now = time.monotonic()
        present = progress()
        if present != last:
            last = present
            progressed_at = now
        if now - progressed_at > limit_s:
            raise TimeoutError(f"no answer within {limit_s:.0f} s")
        if announce and is_main_rank() and now - started_at > ANNOUNCE_S:
            log_line(f"waiting for {awaited}", error=True)
            announce = False
    return future.result()


@contextmanager
def announced(awaited: str) -> Iterator[None]:
    """If the body takes more than ANNOUNCE_S, a line says that `awaited` is waited for. Sets no time limit."""
    timer = Timer(ANNOUNCE_S, log_line, [f"waiting for {awaited}"], {"error": True})
    timer.daemon = True
    if is_main_rank():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
