"""Loads image rows that wait encoded or on disk into a few buffers of host memory, one chunk ahead of the computation."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from clipscale.data.loader.host_batch import RowSource, Slot, Stopwatch
from clipscale.data.loader.offload import OffloadBackend

DECODERS = 4
"""Threads that decode the chunks of offload=encoded where there are no worker processes for it."""

Load = Callable[[Slot, int, int, int], Callable[[], None]]
"""`load(slot, start, stop, buffer)` starts to load rows start..stop of a slot into a buffer. The function it returns waits for them."""


class ThreadLoader:
    """Loads rows by threads of this process: a `Load`."""

    def __init__(self, backend: OffloadBackend, buffers: np.ndarray, threads: int, waited: Stopwatch) -> None:
        self._backend, self._buffers, self._threads, self._waited = backend, buffers, threads, waited
        self._pool = ThreadPoolExecutor(threads, "load")

    def __call__(self, slot: Slot, start: int, stop: int, buffer: int) -> Callable[[], None]:
        rows = self._buffers[buffer, : stop - start]
        parts = [part for part in np.array_split(rows, self._threads) if len(part)]
        firsts = accumulate((len(part) for part in parts), initial=start)
        futures = [self._pool.submit(self._backend.load, slot, first, part) for first, part in zip(firsts, parts)]

        def wait() -> None:
            with self._waited:
                for future in futures:
                    future.result()

        return wait

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)


class Prefetcher(RowSource):
    """Image rows of a few chunks in host memory. Loads the next expected range while the last one is in use.

    `expect` names the ranges that will be asked for. Without it, or after a request outside it, nothing is loaded ahead.
    """

    follows_arrivals = True

    def __init__(
        self, buffers: np.ndarray, load: Load, *, copy: bool, close: Callable[[], None] = lambda: None
    ) -> None:
        """`buffers`: (buffers, chunk, ...), which `load` writes. `copy`: hand out copies, which the caller may keep."""
        self._buffers, self._load, self._copy, self._close = buffers, load, copy, close
        self._given = -1
        """The buffer that was handed out last."""
        self._pending: list[Callable[[], None] | None] = [None] * len(buffers)
        self._holds: list[tuple[int, int] | None] = [None] * len(buffers)
        self._step = -1
        self._arrived = 0

    def open(self, step: int, slot: Slot) -> None:
        self._step, self._slot, self._arrived = step, slot, 0
        self.expect(())

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._ranges = iter(ranges)
        self._next = next(self._ranges, None)

    def arrived(self, step: int, slot: Slot, count: int, size: int) -> None:
        if step == self._step:
            self._arrived = count

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows start..stop, which must have arrived. Without `copy` the tensor holds until the call after the next."""
        capacity = self._buffers.shape[1]
        if stop - start > capacity:
            pieces = range(start, stop, capacity)
            return torch.cat([self.rows(at, min(at + capacity, stop)).clone() for at in pieces])
        if self._next == (start, stop):
            self._next = next(self._ranges, None)
        else:
            self.expect(())
        if self._given < 0 or self._holds[self._given] != (start, stop):
            self._given = self._start((start, stop), self._given + 1)
        self._wait(self._given)
        if self._next and self._next[1] <= self._arrived and self._next != (start, stop):
            self._start(self._next, self._given + 1)
        rows = torch.from_numpy(self._buffers[self._given, : stop - start])
        return rows.clone() if self._copy else rows

    def release(self, step: int) -> None:
        for buffer in range(len(self._buffers)):
            self._wait(buffer)
            self._holds[buffer] = None

    def close(self) -> None:
        self._close()

    def _start(self, span: tuple[int, int], buffer: int) -> int:
        """Start to load the rows into the buffer (counted around), unless it holds them; returns its number."""
        buffer %= len(self._buffers)
        if self._holds[buffer] != span:
            self._wait(buffer)
            self._holds[buffer] = span
            self._pending[buffer] = self._load(self._slot, *span, buffer)
        return buffer

    def _wait(self, buffer: int) -> None:
        pending, self._pending[buffer] = self._pending[buffer], None
        if pending:
            pending()
