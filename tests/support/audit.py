"""What code does beside its work, by the interpreter's audit events, which no Python code can avoid.

Python has no way to take a hook back, so all tests share one, which the first that listens sets: every event costs
time.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, tuple[object, ...]], None]
_listeners = []
_set = []


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    for listener in _listeners:
        listener(event, arguments)


@contextmanager
def heard(listener: Listener) -> Iterator[None]:
    """In this context, `listener` gets every event."""
    if not _set:
        _set.append(True)
        sys.addaudithook(_hook)
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
