"""Image rows that wait encoded: the workers decode them into host memory, ahead of the computation."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from clipscale.data.loader.host_batch import Slot

Span = tuple[int, int]
Load = Callable[[Slot, int, int, int], Callable[[], None]]
"""`load(slot, start, stop, at)` starts to load rows start..stop of a slot to place `at` of the buffers and those after
it. The function it returns waits for them, and may be called again."""


class Prefetcher:
    """Image rows in buffers of host memory, loaded before they are asked for.

    `expect` names the ranges that will be asked for. The next one is loaded while the last one is in use. Without it,
    or after a request outside it, nothing is loaded ahead.
    """

    def __init__(self, buffers: np.ndarray, rows: int, load: Load, *, copy: bool = False) -> None:
        """`buffers`: (places, ...), written by `load`, each of `rows` places. `copy`: hand out copies to keep."""
        self._places = torch.from_numpy(buffers)
        self._capacity = rows
        self._load = load
        self._copy = copy
        count = len(buffers) // rows
        self._spans: list[Span | None] = [None] * count  # what each buffer holds, or will hold after this wait
        self._waits: list[Callable[[], None]] = [lambda: None] * count
        self._last = 0  # the buffer that was handed out last
        self._arrived = 0

    def open(self, slot: Slot) -> None:
        """Go on with the batch in that slot. The one before is not read any more."""
        for wait in self._waits:
            wait()
        self._spans = [None] * len(self._spans)
        self._slot = slot
        self._arrived = 0
        self.expect(())

    def expect(self, ranges: Iterable[Span]) -> None:
        """The row ranges that will be asked for, in order, each taken from the iterable before it is loaded."""
        self._ranges = iter(ranges)
        self._next = next(self._ranges, None)

    def arrived(self, count: int) -> None:
        self._arrived = count

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows start..stop, which must have arrived. Without `copy` the tensor holds until the call after the next."""
        assert stop - start <= self._capacity
        span = start, stop
        if self._next == span:
            self._next = next(self._ranges, None)
        else:
            self.expect(())
        if self._spans[self._last] != span:
            self._last = self._begin(self._last + 1, span)
        self._waits[self._last]()
        if self._next and self._next[1] <= self._arrived and self._next != span:
            self._begin(self._last + 1, self._next)
        first = self._last * self._capacity
        rows = self._places[first : first + stop - start]
        return rows.clone() if self._copy else rows

    def _begin(self, buffer: int, span: Span) -> int:
        """Start to load the range into the buffer (counted around), unless it holds it; returns the buffer's number."""
        buffer %= len(self._spans)
        if self._spans[buffer] != span:
            self._waits[buffer]()
            self._spans[buffer] = span
            self._waits[buffer] = self._load(self._slot, *span, buffer * self._capacity)
        return buffer
