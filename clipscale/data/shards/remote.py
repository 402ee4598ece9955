"""Remote objects as seekable files, read by range requests.

Requests are short and bounded, so that a reader that is slow to come back (its window is being decoded) holds no connection open. While a
block is used the next is fetched by a thread of its own. A request that fails is made again from the byte reached, after a growing random
wait; what has changed meanwhile is given up, never mixed.

What the collector may do (a file that nobody holds any more closes itself) takes no lock: it may come while this very thread holds one.
"""

import io
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import Any

from clipscale.data.shards.access import SourceError, Watch
from clipscale.data.shards.origins import FaultError, Origin, Pieces

FIRST_BLOCK, LARGEST_BLOCK = 1 << 20, 8 << 20
"""Bytes asked for after a seek, and at most; four times as many while the reading goes straight on."""
AHEAD_BYTES = 64 << 20
"""Bound on what all of a process's files together have asked for ahead of their readers."""
LONGEST_WAIT_S = 30.0
TICK_S = 0.1
"""A reader that waits for a thread looks up so often."""


class _Room:
    """What may be asked for ahead by all of a process's threads."""

    def __init__(self) -> None:
        self._lock, self._reserved = threading.Lock(), 0
        self._given: deque[int] = deque()

    @property
    def taken(self) -> int:
        """Bytes that are reserved now."""
        with self._lock:
            return self._settled()

    def _settled(self) -> int:
        while self._given:
            self._reserved -= self._given.popleft()
        return self._reserved

    def take(self, size: int, need: float) -> bool:
        """Reserve so many bytes. The room is for the neediest: the larger `need` (0 to 1), the more of it may be in use afterwards."""
        with self._lock:
            if self._settled() + size > AHEAD_BYTES * need:
                return False
            self._reserved += size
            return True

    def give(self, size: int) -> None:
        """Free them."""
        self._given.append(size)


_room = _Room()


class _Ahead:
    """A request made before its reader gets there: the bytes that have come of it, and what ended it."""

    def __init__(self, start: int, stop: int, request: Callable[[], Pieces], see: Callable[[str], None]) -> None:
        """`request` asks for bytes start..stop, for which there is room; `see` is told what went wrong with them if nobody asks."""
        self.start, self.stop, self._see = start, stop, see
        self._pieces: list[bytes] = []
        self._error: Exception | None = None
        self._over, self._unwanted, self._held = threading.Event(), False, [stop - start]
        threading.Thread(target=self._run, args=(request,), name="read-ahead", daemon=True).start()

    def _run(self, request: Callable[[], Pieces]) -> None:
        try:
            with closing(request()) as pieces:
                for piece in pieces:
                    if self._unwanted:
                        return
                    self._pieces.append(piece)
        except Exception as error:  # raised where the bytes are asked for
            self._error = error
        finally:
            self._over.set()
            if self._unwanted:
                self._end()

    def pieces(self, tick: Callable[[], None]) -> Pieces:
        """Wait for it and give what has come; then raise what ended it early, if anything did."""
        try:
            while not self._over.wait(TICK_S):
                tick()
        except BaseException:  # whoever waited gives up
            self.drop()
            raise
        _room.give(self._held.pop())
        yield from self._pieces
        if self._error is not None:
            raise self._error

    def drop(self) -> None:
        """Nobody will ask for it."""
        self._unwanted = True
        if self._over.is_set():
            self._end()

    def _end(self) -> None:
        """After each has told the other: both may come here, or only one."""
        try:
            size = self._held.pop()
        except IndexError:
            return
        _room.give(size)
        if isinstance(self._error, FaultError):
            self._see(self._error.reason)


class RemoteFile(io.RawIOBase):
    """A remote object as a seekable file: one block of it in memory, and perhaps the next.

    Raises SourceError where it must be given up.
    """

    def __init__(self, origin: Origin, watch: Watch) -> None:
        self._ahead: _Ahead | None = None
        self._origin, self.watch = origin, watch
        """`watch` counts its faults, and is told when its end is near."""
        self._at, self._start, self._block = 0, 0, b""
        self._size = 0
        self.length, self.version = self._patiently()

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
            self.look_ahead()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._drop()
        super().close()

    def look_ahead(self) -> None:
        """Begin to fetch what follows the block in memory, if there is room for as much in view of how little of that block is left."""
        end = self._start + len(self._block)
        if self._ahead is not None or not self._origin.concurrent:
            return
        if end >= self.length:
            self.watch.near_end()
            return
        size = min(self._size_after(end), self.length - end)
        if _room.take(size, (self._at - self._start) / len(self._block) if self._block else 1.0):
            self._ahead = _Ahead(end, end + size, self._request(end, end + size), self._see_later)

    def _request(self, start: int, stop: int) -> Callable[[], Pieces]:
        return lambda: self._origin.read(start, stop, self.version, self.length)

    def _see_later(self, fault: str) -> None:
        self.watch.see_later(fault)

    def _size_after(self, at: int) -> int:
        """Bytes of a block that begins there."""
        straight_on = self._block and at == self._start + len(self._block)
        return min(self._size * 4, LARGEST_BLOCK) if straight_on else FIRST_BLOCK

    def _load(self, needed: int) -> None:
        """Bring in a block that has the byte where we stand."""
        start, size = self._at, self._size_after(self._at)
        stop = min(max(needed, start + size), self.length, start + LARGEST_BLOCK)
        ahead = self._ahead
        if ahead is not None and ahead.start <= self._at < ahead.stop:
            self._ahead = None
            start, stop, size = ahead.start, ahead.stop, self._size_after(ahead.start)
        else:
            self._drop()
            ahead = None
        self._block, self._size = b"", size  # frees it before its successor is read
        self._block, self._start = self._fetch(start, stop, ahead), start

    def _drop(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.drop()

    def _fetch(self, start: int, stop: int, ahead: _Ahead | None) -> bytes:
        pieces: list[bytes] = []
        got = failures = 0
        while got < stop - start:
            before = got
            request = self._request(start + got, stop)() if ahead is None else ahead.pieces(self.watch.tick)
            ahead = None
            try:
                with closing(request):
                    for piece in request:
                        pieces.append(piece)
                        got += len(piece)
                        self.watch.tick()
            except FaultError as fault:
                failures = failures + 1 if got == before else 0
                self._bear(fault, failures)
        return b"".join(pieces)

    def _patiently(self) -> tuple[int, str]:
        failures = 0
        while True:
            try:
                return self._origin.about()
            except FaultError as fault:
                failures += 1
                self._bear(fault, failures)

    def _bear(self, fault: FaultError, failures: int) -> None:
        """Count the fault and wait, longer after each without progress; a random share of it, so that readers do not return at once."""
        self.watch.see(fault.reason)
        self.watch.tick()
        if failures > self.watch.access.retries:
            raise SourceError("unreachable_shard", f"{failures} requests failed, the last: {fault}") from fault
        longest = min(0.25 * 2 ** min(failures, 30), LONGEST_WAIT_S)  # 2**1026 is no float
        time.sleep(max(random.uniform(0, longest), min(fault.wait_s, LONGEST_WAIT_S)))
