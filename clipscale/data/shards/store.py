"""Opens shards wherever they are: local files and remote objects.

Objects are read by requests for ranges (requests.py). Requests are short and bounded, so a reader that pauses to decode
holds no connection open. A failed request is repeated. An object that changes is given up, so that versions never mix.
"""

import io
import math
import os
import random
import stat
import time
from collections import Counter
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import cast

from clipscale.common.errors import LoaderError, UserError
from clipscale.common.remote import ANNOUNCE_S
from clipscale.common.signals import Poll, no_poll
from clipscale.common.terminal import is_main_rank, log_line
from clipscale.data.addresses import is_local
from clipscale.data.shards.requests import NO_ANSWER, ObjectState, Request, SourceError, TransientError, start_request

# A shard is given up after this many failed retries in a row. The waits between them take about 45 seconds; a request
# without an answer takes up to 94 seconds more.
RETRIES = 8
# Bytes of a request.
REQUEST_BYTES = 4 << 20
# Bound on the random wait between two attempts, and on the wait that a server asks for by Retry-After.
MAX_WAIT_S = 30.0
# Interval at which a reader that waits for a request calls `poll`.
TICK_S = 0.1
# Bytes that are read of a shard at once.
BUFFER_BYTES = 1 << 17


class Store:
    """Opens shards for one reader."""

    def __init__(self, poll: Poll = no_poll, limit_s: float = math.inf) -> None:
        """`poll` is called during waits and may raise to end them. `limit_s`: a server's time for a sample."""
        self.poll = poll
        self.limit_s = limit_s
        # When the server's time for the present sample ends.
        self.until = time.monotonic() + limit_s
        # Fault -> how often it has happened. Faults cost no sample, such as a request that is repeated.
        self.faults: Counter[str] = Counter()

    def begin_sample(self) -> None:
        """Start the time in which a server must send the next sample."""
        self.until = time.monotonic() + self.limit_s

    def open(self, url: str) -> tuple[io.BufferedReader, ObjectState]:
        """The shard's bytes as a seekable file, which the caller closes, and its state.

        Raises OSError for a local file. For a remote one raises SourceError (`unreachable_shard`, `missing_shard` ...),
        and UserError without credentials.
        """
        if is_local(url):
            state = self.state(url)  # checked first, because opening a pipe would wait
            return cast(io.BufferedReader, Path(url).open("rb", BUFFER_BYTES)), state
        self.begin_sample()
        remote = open_remote(url, self)
        return io.BufferedReader(remote, BUFFER_BYTES), remote.state

    def state(self, url: str) -> ObjectState:
        """Size and version of a shard now. Raises OSError or SourceError."""
        if is_local(url):
            return local_state(url)
        return fetch(self, url, 0, 1)[1]

    def count_fault(self, fault: str) -> None:
        self.faults[fault] += 1


def local_state(path: str) -> ObjectState:
    """The state of a file. Raises OSError."""
    status = os.stat(path)  # noqa: PTH116 (for each of very many)
    if not stat.S_ISREG(status.st_mode):
        raise OSError("no regular file")
    return ObjectState(status.st_size, str(status.st_mtime_ns))


def fetch(store: Store, url: str, start: int, stop: int, request: Request | None = None) -> tuple[bytes, ObjectState]:
    """Bytes start..stop of an object, or the first of them if the answer was cut off, and the object's state.

    `request`: the first attempt, if one is under way. The store counts failures. Raises SourceError:
    `unreachable_shard` after RETRIES + 1 failures; and UserError without credentials.
    """
    failures = 0
    while True:
        if time.monotonic() > store.until:
            raise SourceError("unreachable_shard", f"no sample within data.timeout_s={store.limit_s:g}")
        request = request or start_request(url, start, stop)
        try:
            while not futures.wait([request], TICK_S).done:
                store.poll()
            return request.result()
        except TransientError as error:
            store.count_fault(error.reason)
            failures += 1
            retry_after_s = float(error.retry_after) if error.retry_after.isdecimal() else 0  # else it is a date
            if failures > RETRIES:
                raise SourceError("unreachable_shard", f"{failures} requests failed, the last: {error}") from error
        finally:
            request.cancel()
        request = None
        # a random wait, so that readers do not all return at once
        random_s = random.uniform(0, min(0.25 * 2**failures, MAX_WAIT_S))
        _wait_until(time.monotonic() + min(retry_after_s, MAX_WAIT_S) + random_s, store)


def _wait_until(until: float, store: Store) -> None:
    """Sleep until `until`, a time of the monotonic clock. Calls the store's poll at least every TICK_S."""
    remaining_s = until - time.monotonic()
    while remaining_s > 0:
        store.poll()
        time.sleep(min(remaining_s, TICK_S))
        remaining_s = until - time.monotonic()


def probe_objects(urls: Sequence[str], awaited: str = "") -> dict[str, SourceError]:
    """Request a byte of each object, all at once. Returns the errors of those that cannot be read.

    After ANNOUNCE_S a line says that `awaited` is waited for. Raises LoaderError if no request is answered, and
    UserError without credentials.
    """
    requests = {url: start_request(url, 0, 1) for url in urls}
    late = futures.wait(requests.values(), ANNOUNCE_S).not_done
    if late and is_main_rank():
        asked = f"an answer about {len(late)} of {len(urls)} shards (first: {urls[0]})"
        log_line(f"waiting for {awaited or asked}", error=True)
    futures.wait(requests.values())  # each has its limit
    errors = {}
    for url, request in requests.items():
        error = request.exception()
        if isinstance(error, UserError):
            raise error
        if isinstance(error, SourceError):
            errors[url] = error
    silent = [error for error in errors.values() if error.reason == NO_ANSWER]
    if urls and len(silent) == len(urls):
        raise LoaderError(f"data.train: {urls[0]}: {silent[-1]}; the server is silent, give the command again later")
    return errors


class RemoteFile(io.RawIOBase):
    """An object as a seekable file. Prefetches the next block while one is read. Raises SourceError.

    `open_remote` makes it.
    """

    def __init__(self, url: str, store: Store, block: bytes, state: ObjectState) -> None:
        """`block`: the first one. `state`: the object's."""
        self._url = url
        self._store = store
        # Where the next read begins, and where the block does.
        self._position = 0
        self._start = 0
        # The request for the next block.
        self._ahead: Request | None = None
        self._block = block
        self.state = state
        self.size = state.size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Copy bytes of the current block into the buffer; at its end loads the next block. Returns how many."""
        if self._position >= self.size:
            return 0
        if not self._start <= self._position < self._start + len(self._block):
            self._load()
        first = self._position - self._start
        data = self._block[first : first + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._forget_ahead()
        super().close()

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    def _load(self) -> None:
        """Load the block at the current position, and prefetch the next one if the reader reads sequentially."""
        sequential = self._position == self._start + len(self._block)
        if not sequential:
            self._forget_ahead()
        stop = min(self._position + REQUEST_BYTES, self.size)
        request = self._ahead
        self._ahead = None
        self._block = b""
        self._start = self._position
        self._block, state = fetch(self._store, self._url, self._position, stop, request)
        if state != self.state:
            raise SourceError("changed_shard", "it changed on the server while it was read")
        end = self._start + len(self._block)
        if sequential and end < self.size:
            self._ahead = start_request(self._url, end, min(end + REQUEST_BYTES, self.size))


def open_remote(url: str, store: Store) -> RemoteFile:
    """The object with its first block, which is fetched. Raises as `fetch`."""
    block, state = fetch(store, url, 0, REQUEST_BYTES)
    return RemoteFile(url, store, block, state)
