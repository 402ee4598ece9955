"""Remote objects as seekable files, read block by block, with the next block prefetched on fsspec's event loop.

Requests are short and bounded, so a reader that pauses to decode holds no connection open. A failed request is repeated
from the byte reached; an object that changes is given up, its versions are never mixed.

A file without references is closed by the collector, perhaps while the same thread holds a lock. So closing and
dropping take no lock of ours.
"""

import io
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from clipscale.data.shards.access import ReadContext
from clipscale.data.shards.remote_object import RemoteObject, Retry, State, TransientError, result, submit

FIRST_BLOCK, LARGEST_BLOCK = 1 << 20, 8 << 20
"""Bytes of the first block after a seek, and of the largest; sequential blocks grow fourfold."""
PREFETCH_BYTES = 64 << 20
"""Bound on the prefetched bytes of all files of a process."""


class PrefetchBudget:
    """The bytes that all files of a process may prefetch together."""

    def __init__(self) -> None:
        self._lock, self._bytes = threading.Lock(), 0
        self._released: deque[int] = deque()

    @property
    def reserved(self) -> int:
        """Bytes reserved now."""
        with self._lock:
            return self._update()

    def _update(self) -> int:
        while self._released:
            self._bytes -= self._released.popleft()
        return self._bytes

    def reserve(self, size: int, need: float) -> bool:
        """Reserve bytes if the total stays within the share `need` (0 to 1) of the budget: the neediest can get most."""
        with self._lock:
            if self._update() + size > PREFETCH_BYTES * need:
                return False
            self._bytes += size
            return True

    def release(self, size: int) -> None:
        """Free reserved bytes; takes no lock."""
        self._released.append(size)


_budget = PrefetchBudget()


class BlockRequest:
    """A request for bytes start..stop of an object, perhaps before its reader gets there."""

    def __init__(self, remote: RemoteObject, start: int, stop: int, state: State, reserved: int = 0) -> None:
        """`reserved` bytes of the budget are released when the block is taken or dropped."""
        self.start, self.stop, self._reserved = start, stop, reserved
        self.pieces: list[bytes] = []
        """The bytes that have come."""
        self.future = submit(remote.read(start, stop, state, self.pieces))

    def take(self, tick: Callable[[], None]) -> None:
        """Wait for the block. Raises the error that ended the request early; `pieces` has what came before."""
        try:
            result(self.future, tick)
        finally:
            self._release()

    def drop(self, count: Callable[[str], None]) -> None:
        """End the request. `count` counts its failure."""
        if (
            not self.future.cancel() and self.future.done()
        ):  # the collector may call this on the loop's thread: never wait
            error = self.future.exception()
            if isinstance(error, TransientError):
                count(error.reason)
        self._release()

    def _release(self) -> None:
        _budget.release(self._reserved)
        self._reserved = 0


class RemoteFile(io.RawIOBase):
    """A remote object as a seekable file, with one or two blocks in memory. Raises SourceError when it gives up."""

    def __init__(self, remote: RemoteObject, context: ReadContext) -> None:
        self._prefetch: BlockRequest | None = None
        self._remote, self.context = remote, context
        self._at, self._start, self._block = 0, 0, b""
        self._size = 0
        self.length, self.version = Retry(context).stat(remote)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self.length)[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        stop = self.length if size is None or size < 0 else min(self._at + size, self.length)
        parts = []
        while self._at < stop:
            if not self._start <= self._at < self._start + len(self._block):
                self._load(stop)
            part = self._block[self._at - self._start : stop - self._start]
            self._at += len(part)
            parts.append(part)
            self.prefetch()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._drop()
        super().close()

    def prefetch(self) -> None:
        """Prefetch the next block if the budget allows it; the need grows with the part of this block that is read."""
        end = self._start + len(self._block)
        if self._prefetch is not None or not self._remote.concurrent:
            return
        if end >= self.length:
            self.context.near_end()
            return
        size = min(self._size_after(end), self.length - end)
        if _budget.reserve(size, (self._at - self._start) / len(self._block) if self._block else 1.0):
            self._prefetch = self._request(end, end + size, size)

    def _request(self, start: int, stop: int, reserved: int = 0) -> BlockRequest:
        return BlockRequest(self._remote, start, stop, (self.length, self.version), reserved)

    def _size_after(self, at: int) -> int:
        """Bytes of a block that begins at `at`."""
        sequential = self._block and at == self._start + len(self._block)
        return min(self._size * 4, LARGEST_BLOCK) if sequential else FIRST_BLOCK

    def _load(self, needed: int) -> None:
        """Replace the block by one that holds the current byte."""
        start, size = self._at, self._size_after(self._at)
        stop = min(max(needed, start + size), self.length, start + LARGEST_BLOCK)
        prefetch = self._prefetch
        if prefetch is not None and prefetch.start <= self._at < prefetch.stop:
            self._prefetch = None
            start, stop, size = prefetch.start, prefetch.stop, self._size_after(prefetch.start)
        else:
            self._drop()
            prefetch = None
        self._block, self._size = b"", size  # frees it before its successor is read
        self._block, self._start = self._fetch(start, stop, prefetch), start

    def _drop(self) -> None:
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            prefetch.drop(self.context.count_later)

    def _fetch(self, start: int, stop: int, prefetch: BlockRequest | None) -> bytes:
        """Bytes start..stop, first from the prefetch, then by requests from the byte reached."""
        pieces: list[bytes] = []
        retry = Retry(self.context)
        while start < stop:
            request = prefetch or self._request(start, stop)
            prefetch = None
            try:
                request.take(self.context.tick)
            except TransientError as error:
                retry.wait(error, gained=sum(map(len, request.pieces)) / (stop - start))
            pieces += request.pieces
            start += sum(map(len, request.pieces))
        return b"".join(pieces)
