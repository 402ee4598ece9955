"""Remote objects as seekable files, read block by block, with the next block prefetched by a thread.

Requests are short and bounded, so a reader that pauses to decode holds no connection open. A failed request is repeated
from the byte reached; an object that changes is given up, its versions are never mixed.

A file without references is closed by the collector, perhaps while the same thread holds a lock. So closing and
dropping take none.
"""

import io
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import Any, Generic, NamedTuple, TypeVar

from clipscale.data.shards.access import ReadContext
from clipscale.data.shards.remote_object import Pieces, RemoteObject, Retry, TransientError

FIRST_BLOCK, LARGEST_BLOCK = 1 << 20, 8 << 20
"""Bytes of the first block after a seek, and of the largest; sequential blocks grow fourfold."""
PREFETCH_BYTES = 64 << 20
"""Bound on the prefetched bytes of all files of a process."""
TICK_S = 0.1
"""Interval at which a reader that waits for a thread calls `tick`."""

T = TypeVar("T")


class DroppedError(Exception):
    """Ends a prefetch whose result nobody wants any more."""


class Prefetch(Generic[T]):
    """Work that a thread does before its reader needs the result."""

    def __init__(
        self, name: str, work: Callable[[Callable[[], None]], T], discard: Callable[[T | None], None] = lambda _: None
    ) -> None:
        """`work` gets a function that raises DroppedError after a drop; `discard` gets the result of a dropped one."""
        self.done, self._wanted = threading.Event(), True
        self._result: T | None = None
        self._error: Exception | None = None
        self._discard = [discard]
        threading.Thread(target=self._run, args=(work,), name=f"prefetch-{name}", daemon=True).start()

    def _run(self, work: Callable[[Callable[[], None]], T]) -> None:
        try:
            self._result = work(self._check)
        except Exception as error:  # raised where the result is taken
            self._error = error
        finally:
            self.done.set()
            if not self._wanted:
                self._discard_once()

    def _check(self) -> None:
        if not self._wanted:
            raise DroppedError

    def take(self, tick: Callable[[], None]) -> T:
        """Wait for the result; it is the caller's. Raises what the work or `tick` raised."""
        try:
            while not self.done.wait(TICK_S):
                tick()
        except BaseException:
            self.drop()
            raise
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set where there is no error

    def drop(self) -> None:
        """Discard the result, now or when it comes."""
        self._wanted = False
        if self.done.is_set():
            self._discard_once()

    def _discard_once(self) -> None:
        """Both the thread and the reader may come here; `pop` lets one of them through, without a lock."""
        try:
            discard = self._discard.pop()
        except IndexError:
            return
        discard(self._result)


class PrefetchBudget:
    """The bytes that all threads of a process may prefetch together."""

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


class _Block(NamedTuple):
    """The pieces that one request returned, and the error that ended it early."""

    pieces: list[bytes]
    error: Exception | None


class BlockPrefetch(Prefetch[_Block]):
    """A request for bytes start..stop of a file, made before the reader gets there."""

    def __init__(self, start: int, stop: int, request: Callable[[], Pieces], count: Callable[[str], None]) -> None:
        """The caller has reserved the bytes. `count` counts the failure of a request that is dropped."""
        self.start, self.stop = start, stop

        def work(check: Callable[[], None]) -> _Block:
            received: list[bytes] = []
            try:
                with closing(request()) as pieces:
                    for piece in pieces:
                        check()
                        received.append(piece)
            except Exception as error:  # raised behind the pieces
                return _Block(received, error)
            return _Block(received, None)

        def discard(block: _Block | None) -> None:
            _budget.release(stop - start)
            if block and isinstance(block.error, TransientError):
                count(block.error.reason)

        super().__init__("block", work, discard)

    def pieces(self, tick: Callable[[], None]) -> Pieces:
        """The pieces received; then raises the error that ended the request early, if any."""
        block = self.take(tick)
        _budget.release(self.stop - self.start)
        yield from block.pieces
        if block.error is not None:
            raise block.error


class RemoteFile(io.RawIOBase):
    """A remote object as a seekable file, with one or two blocks in memory. Raises SourceError when it gives up."""

    def __init__(self, remote: RemoteObject, context: ReadContext) -> None:
        self._prefetch: BlockPrefetch | None = None
        self._remote, self.context = remote, context
        self._at, self._start, self._block = 0, 0, b""
        self._size = 0
        self.length, self.version = Retry(context).call(remote.stat)

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
            self._prefetch = BlockPrefetch(end, end + size, self._request(end, end + size), self.context.count_later)

    def _request(self, start: int, stop: int) -> Callable[[], Pieces]:
        return lambda: self._remote.read(start, stop, self.version, self.length)

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
            prefetch.drop()

    def _fetch(self, start: int, stop: int, prefetch: BlockPrefetch | None) -> bytes:
        """Bytes start..stop, first from the prefetch, then by requests from the byte reached."""
        pieces: list[bytes] = []
        got, retry = 0, Retry(self.context)
        while got < stop - start:
            before, asked = got, stop - start - got
            request = prefetch.pieces(self.context.tick) if prefetch else self._request(start + got, stop)()
            prefetch = None
            try:
                with closing(request):
                    for piece in request:
                        pieces.append(piece)
                        got += len(piece)
                        self.context.tick()
            except TransientError as error:
                retry.wait(error, gained=(got - before) / asked)
        return b"".join(pieces)
