"""Remote objects as seekable files, read by range requests.

Requests are short and bounded, so that a reader that is slow to come back (its window is being decoded) holds no connection open. One
that fails is made again from the byte reached, after a growing random wait; what has changed meanwhile is given up, never mixed.
"""

import io
import os
import random
import re
import time
from collections.abc import Iterator
from typing import Any, Protocol

import requests

from clipscale.data.sources import SourceError, Store, scheme_of

FIRST_BLOCK, LARGEST_BLOCK = 1 << 20, 8 << 20
"""Bytes asked for after a seek, and at most; doubled while the reading goes straight on."""
LONGEST_WAIT_S = 30.0
SLOWEST = 1024
"""Bytes a second; an answer that comes more slowly for a time-out's length is ended and asked for again."""
_AGAIN = {408, 425, 429, 500, 502, 503, 504}
"""HTTP statuses that may pass."""
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)$")


class FaultError(Exception):
    """A request that failed in a way that may pass. `reason` names it among the faults counted."""

    def __init__(self, reason: str, detail: str = "", wait_s: float = 0.0) -> None:
        super().__init__(detail or reason)
        self.reason, self.wait_s = reason, wait_s


class Origin(Protocol):
    """One remote object."""

    def about(self) -> tuple[int, str]:
        """Its size and its version (ETag, generation, time of change: whatever the server has). Raises FaultError, SourceError."""

    def read(self, start: int, stop: int, version: str, size: int) -> Iterator[bytes]:
        """Bytes start..stop in pieces; SourceError `changed_shard` before any that belong to another version."""


def origin_of(url: str, wait_s: float) -> Origin:
    """The object behind an address."""
    return HttpOrigin(url, wait_s) if scheme_of(url) in ("http", "https") else FsspecOrigin(url)


# -- https -------------------------------------------------------------------------------------------------------------

_sessions: dict[int, requests.Session] = {}


def _session() -> requests.Session:
    """One a process: connections must not be shared with a fork. Threads may ask at once."""
    session = _sessions.get(os.getpid())
    if session is None:
        _sessions.clear()
        session = _sessions[os.getpid()] = requests.Session()
    return session


class HttpOrigin:
    """An object on a web server. Servers without ranges are read from the start and what was there before is passed over."""

    def __init__(self, url: str, wait_s: float) -> None:
        self._url, self._wait_s = url, wait_s

    def about(self) -> tuple[int, str]:
        # not HEAD: addresses that are signed for GET refuse it
        with self._get(0, 1) as answer:
            return self._size(answer, 0), self._version(answer)

    def read(self, start: int, stop: int, version: str, size: int) -> Iterator[bytes]:
        with self._get(start, stop) as answer:
            if self._version(answer) != version or self._size(answer, start) != size:
                raise SourceError("changed_shard", "it changed on the server while it was read")
            left = stop - start
            skip = start if answer.status_code == 200 else 0
            begun, came = time.monotonic(), 0
            try:
                while left > 0:
                    data = answer.raw.read1(min(skip or left, 1 << 16), decode_content=False)
                    if not data:
                        raise FaultError("short_answer", f"{left} bytes missing")
                    came += len(data)
                    if (passed := time.monotonic() - begun) > self._wait_s:
                        if came < SLOWEST * passed:
                            raise FaultError("slow_answer", f"{came} bytes in {passed:.0f} s")
                        begun, came = time.monotonic(), 0
                    if skip:
                        skip -= len(data)
                        continue
                    left -= len(data)
                    yield data
            except FaultError:
                raise
            except Exception as error:  # urllib3, http.client, ssl and socket all have their own
                raise FaultError("dropped_connection", f"{type(error).__name__}: {error}") from error

    def _get(self, start: int, stop: int) -> requests.Response:
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        try:
            answer = _session().get(self._url, headers=headers, stream=True, timeout=self._wait_s)
        except (requests.exceptions.InvalidURL, requests.exceptions.MissingSchema) as error:
            raise SourceError("missing_shard", str(error)) from error
        except (requests.RequestException, OSError) as error:
            raise FaultError("no_connection", f"{type(error).__name__}: {error}") from error
        if answer.status_code in (200, 206):
            return answer
        answer.close()
        if answer.status_code in _AGAIN:
            wait = answer.headers.get("Retry-After", "")
            raise FaultError(f"http_{answer.status_code}", wait_s=float(wait) if wait.isdigit() else 0.0)
        if answer.status_code == 416:
            raise SourceError("changed_shard" if start else "unreadable_shard", "shorter than it was, or empty")
        raise SourceError("missing_shard", f"HTTP status {answer.status_code}")

    @staticmethod
    def _version(answer: requests.Response) -> str:
        return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""

    @staticmethod
    def _size(answer: requests.Response, start: int) -> int:
        if answer.status_code == 206:
            found = _RANGE.match(answer.headers.get("Content-Range", ""))
            if not found or int(found[1]) != start:
                answer.close()
                raise FaultError("wrong_range", answer.headers.get("Content-Range", "no Content-Range"))
            return int(found[3])
        length = answer.headers.get("Content-Length", "")
        if not length.isdigit():
            answer.close()
            raise SourceError("unknown_length", "the server does not say how long it is")
        return int(length)


# -- what fsspec reads -------------------------------------------------------------------------------------------------


class FsspecOrigin:
    """An object of S3, Google Cloud Storage, the Hugging Face hub, or of anything else that fsspec knows.

    Credentials, endpoints and the like come from each library's own environment variables and files, or from fsspec's.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._fs, self._path = url_to_fs(url, use_listings_cache=False)

    def about(self) -> tuple[int, str]:
        info = self._ask(lambda: self._fs.info(self._path))
        version = [
            str(info[name])
            for name in ("ETag", "etag", "generation", "blob_id", "mtime", "LastModified", "updated", "created")
            if info.get(name) is not None
        ]
        if info.get("size") is None:
            raise SourceError("unknown_length", "the server does not say how long it is")
        return int(info["size"]), version[0] if version else ""

    def read(self, start: int, stop: int, version: str, size: int) -> Iterator[bytes]:
        data = self._ask(lambda: self._fs.cat_file(self._path, start=start, end=stop))
        # asked after reading: what still has the first version then had it while it was read
        if self.about() != (size, version):
            raise SourceError("changed_shard", "it changed on the server while it was read")
        if len(data) > stop - start:
            raise FaultError("wrong_range", f"{len(data)} bytes for {stop - start}")
        yield data
        if len(data) < stop - start:
            raise FaultError("short_answer", f"{stop - start - len(data)} bytes missing")

    @staticmethod
    def _ask(question: Any) -> Any:
        try:
            return question()
        except (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError) as error:
            raise SourceError("missing_shard", f"{type(error).__name__}: {error}") from error
        except (
            Exception
        ) as error:  # each library behind fsspec has its own; all are asked again, a bounded number of times
            raise FaultError("failed_request", f"{type(error).__name__}: {error}") from error


# -- as a file ---------------------------------------------------------------------------------------------------------


class RemoteFile(io.RawIOBase):
    """A remote object as a seekable file with one block of it in memory. Raises SourceError where it must be given up."""

    def __init__(self, origin: Origin, store: Store) -> None:
        self._origin, self._store = origin, store
        self._at, self._start, self._block = 0, 0, b""
        self._next = FIRST_BLOCK
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

    def read(self, size: int = -1) -> bytes:
        stop = self.length if size < 0 else min(self._at + size, self.length)
        parts = []
        while self._at < stop:
            if not self._start <= self._at < self._start + len(self._block):
                self._load(stop)
            part = self._block[self._at - self._start : stop - self._start]
            self._at += len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _load(self, needed: int) -> None:
        """Bring in the block that begins where we stand."""
        straight_on = self._at == self._start + len(self._block)
        self._next = min(self._next * 2, LARGEST_BLOCK) if straight_on and self._at else FIRST_BLOCK
        stop = min(max(needed, self._at + self._next), self.length, self._at + LARGEST_BLOCK)
        self._block = b""  # frees it before its successor is read
        self._block, self._start = self._fetch(self._at, stop), self._at

    def _fetch(self, start: int, stop: int) -> bytes:
        got = bytearray()
        failures = 0
        while len(got) < stop - start:
            before = len(got)
            try:
                for piece in self._origin.read(start + before, stop, self.version, self.length):
                    got += piece
                    self._store.tick()
            except FaultError as fault:
                failures = failures + 1 if len(got) == before else 0
                self._bear(fault, failures)
        return bytes(got)

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
        self._store.see(fault.reason)
        self._store.tick()
        if failures > self._store.access.retries:
            raise SourceError("unreachable_shard", f"{failures} requests failed, the last: {fault}") from fault
        longest = min(0.25 * 2**failures, LONGEST_WAIT_S)
        time.sleep(max(random.uniform(0, longest), min(fault.wait_s, LONGEST_WAIT_S)))
