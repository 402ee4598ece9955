"""Bounds on what a test may take, which fail it."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def address_space(more: int) -> Iterator[None]:
    """This process, and those that it starts meanwhile, get at most so many more bytes of address space (RLIMIT_AS)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def bounded(seconds: float = 10, grown: int = 512 << 20) -> Iterator[None]:
    """The clock, and the address space of this process, meanwhile."""
    started = time.monotonic()
    with address_space(grown):
        yield
    taken = time.monotonic() - started
    assert taken < seconds, f"took {taken:.1f} s"
