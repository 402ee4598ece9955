"""Opens shards wherever they are: local files and remote objects.

Objects are read by requests for ranges on fsspec's event loop. Requests are short and bounded, so a reader that pauses
to decode holds no connection open. A failed request is repeated; an object that changes is given up, its versions never
mix.
"""

import asyncio
import io
import math
import os
import random
import re
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent import futures
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from clipscale.common.errors import LoaderError, UserError
from clipscale.common.remote import ANNOUNCE_S, NO_CREDENTIALS, check_credentials, no_credentials
from clipscale.common.terminal import log_line, main_rank
from clipscale.data.addresses import bucket_of, is_local, scheme_of
from clipscale.data.shards.errors import EVENT, SourceError

# A shard is given up after this many failed retries in a row: about a minute.
RETRIES = 8
# Seconds of a server's silence after which a request is repeated.
WAIT_S = 30.0
# Bytes of a request.
REQUEST_BYTES = 4 << 20
# Least bytes of a cut-off answer that count as progress. A server that sends a byte a request must not hold a reader.
MIN_PROGRESS_BYTES = 1 << 14
# The time limit of a request allows for at least this speed.
MIN_BYTES_PER_S = 1 << 16
# Bound on the random wait between two attempts, and on what a server adds to it by Retry-After.
MAX_WAIT_S = 30.0
# Interval at which a reader that waits for a request calls `poll`.
TICK_S = 0.1
# Counter of requests that timed out.
NO_ANSWER = "no_answer"
# Counter of requests to a server that cannot be found.
UNKNOWN_HOST = "unknown_host"
# What aiohttp and botocore raise for a server that cannot be found.
_NO_HOST = ("ClientConnectorDNSError", "EndpointConnectionError")
# HTTP statuses that may pass.
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
# HTTP statuses of a redirect.
_MOVED = {301, 302, 303, 307, 308}
# Most redirects that are followed.
REDIRECTS = 10
# Settings of fsspec's http that are sent only to the server in the user's address.
_SECRETS = ("headers", "auth", "cookies", "params")
_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18})$")
# Characters of an address that are sent as they are, since it may be signed; others, such as spaces, are quoted.
_IN_ADDRESSES = "!#$%&'()*+,/:;=?@[]~"
# Size and version (ETag, generation, time of change) of an object: they identify its content.
ObjectState = tuple[int, str]
Request = futures.Future[tuple[bytes, ObjectState]]


# Bytes that are read of a shard at once.
BUFFER = 1 << 17


class Store:
    """Opens shards for one reader."""

    def __init__(
        self, counts: Counter[str] | None = None, poll: Callable[[], None] = lambda: None, limit_s: float = math.inf
    ) -> None:
        """`counts` receives events that cost no sample. `poll` is called during waits and may raise to end them.
        `limit_s`: a server's time for a sample."""
        self.poll = poll
        self.limit_s = limit_s
        # When the server's time for the present sample ends.
        self.until = time.monotonic() + limit_s
        self.counts = Counter() if counts is None else counts

    def begin_sample(self) -> None:
        """Start the time in which a server must send the next sample."""
        self.until = time.monotonic() + self.limit_s

    def open(self, url: str) -> tuple[io.BufferedReader, ObjectState]:
        """The shard's bytes as a seekable file, which the caller closes, and its state.

        Raises OSError for a local file, SourceError (`unreachable_shard`, `missing_shard`, ...) for a remote one.
        """
        if is_local(url):
            state = self.state(url)  # first: opening a pipe would wait
            return cast(io.BufferedReader, Path(url).open("rb", BUFFER)), state
        self.begin_sample()
        remote = open_remote(url, self)
        return io.BufferedReader(remote, BUFFER), remote.state

    def state(self, url: str) -> ObjectState:
        """Size and version of a shard now. Raises OSError or SourceError."""
        if is_local(url):
            return local_state(url)
        return fetch(self, url, 0, 1)[1]

    def count(self, event: str) -> None:
        """Count an event that costs no sample."""
        self.counts[EVENT + event] += 1


def local_state(path: str) -> ObjectState:
    """The state of a file. Raises OSError."""
    status = os.stat(path)  # noqa: PTH116 (for each of very many)
    if not stat.S_ISREG(status.st_mode):
        raise OSError("no regular file")
    return status.st_size, str(status.st_mtime_ns)


class TransientError(SourceError):
    """A request failed in a way that may pass. `reason` names its counter."""

    # The answer's header Retry-After.
    retry_after = ""


def start_request(url: str, start: int, stop: int) -> Request:
    """Begin a request for bytes start..stop of an object."""
    from fsspec.asyn import get_loop

    return asyncio.run_coroutine_threadsafe(_request(url, start, stop), get_loop())


def fetch(store: Store, url: str, start: int, stop: int, request: Request | None = None) -> tuple[bytes, ObjectState]:
    """Bytes start..stop of an object, or the first of them if the answer was cut off, and the object's state.

    `request`: the first attempt, if one is under way. The store counts failures. Raises SourceError:
    `unreachable_shard` after RETRIES + 1 failures.
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
            store.count(error.reason)
            failures += 1
            retry_after_s = float(error.retry_after) if error.retry_after.isdecimal() else 0  # it may be a date
            if failures > RETRIES:
                raise SourceError("unreachable_shard", f"{failures} requests failed, the last: {error}") from error
        finally:
            request.cancel()
        request = None
        # a random wait, so that readers do not all return at once
        random_s = random.uniform(0, min(0.25 * 2**failures, MAX_WAIT_S))
        _wait_until(time.monotonic() + min(retry_after_s, MAX_WAIT_S) + random_s, store)


def _wait_until(until: float, store: Store) -> None:
    """Polls meanwhile."""
    remaining_s = until - time.monotonic()
    while remaining_s > 0:
        store.poll()
        time.sleep(min(remaining_s, TICK_S))
        remaining_s = until - time.monotonic()


def look_up(urls: Sequence[str], awaited: str = "") -> dict[str, SourceError]:
    """Request a byte of each object, all at once. Returns the errors of those that cannot be read.

    After ANNOUNCE_S a line says that `awaited` is waited for. Raises LoaderError if no request is answered, and
    UserError without credentials.
    """
    requests = {url: start_request(url, 0, 1) for url in urls}
    late = futures.wait(requests.values(), ANNOUNCE_S).not_done
    if late and main_rank():
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
        self.size = state[0]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Write the next bytes of the current block, at its end of the next one, and return their number."""
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


# -- requests, on fsspec's event loop ----------------------------------------------------------------------------------


async def _request(url: str, start: int, stop: int) -> tuple[bytes, ObjectState]:
    """Bytes start..stop, or fewer where the object ends or the answer is cut off, and the object's state.

    Raises TransientError, SourceError for what does not pass, and UserError without credentials.
    """
    begun = time.monotonic()
    limit = WAIT_S + (stop - start) / MIN_BYTES_PER_S
    try:
        if scheme_of(url) in ("http", "https"):
            data, state = await _from_web(url, start, stop, limit)
        elif scheme_of(url) == "hf":  # its file system has no asyncio, and asks the hub's interface for each block
            from huggingface_hub.utils import build_hf_headers

            address = await asyncio.wait_for(asyncio.to_thread(_hub_address, url), WAIT_S)
            data, state = await _from_web(address, start, stop, limit, build_hf_headers())
        else:
            data, state = await asyncio.wait_for(_from_file_system(url, start, stop), limit)
    except (SourceError, UserError):
        raise
    except TimeoutError as error:
        seconds = time.monotonic() - begun
        raise TransientError(NO_ANSWER, f"no answer of {stop - start} bytes within {seconds:.3g} s") from error
    except (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError) as error:
        raise SourceError("missing_shard", f"{type(error).__name__}: {error}") from error
    except Exception as error:  # each library has its own
        if type(error).__name__ in NO_CREDENTIALS:
            raise no_credentials(f"data.train: {bucket_of(url)}", error) from error
        reason = UNKNOWN_HOST if type(error).__name__ in _NO_HOST else "failed_request"
        raise TransientError(reason, f"{type(error).__name__}: {error}") from error
    missing = min(stop, state[0]) - start - len(data)
    if missing > 0 and len(data) < MIN_PROGRESS_BYTES:
        came = f"{len(data)} of {len(data) + missing} bytes came in {time.monotonic() - begun:.3g} s"
        raise TransientError("short_answer", came)
    return data, state


async def _from_file_system(url: str, start: int, stop: int) -> tuple[bytes, ObjectState]:
    """Bytes start..stop and the object's state, by fsspec's file system, with its credentials and settings."""
    from fsspec.core import url_to_fs

    await asyncio.to_thread(check_credentials, scheme_of(url), f"data.train: {bucket_of(url)}")
    system, path = url_to_fs(url, use_listings_cache=False)
    data = await system._cat_file(path, start=start, end=stop)
    info = await system._info(path)  # afterwards: an object that still has the first version had it meanwhile
    version = next((str(info[name]) for name in ("generation", "ETag", "etag") if name in info), "")
    return data[: stop - start], (int(info["size"]), version)


@asynccontextmanager
async def _http_get(
    url: str, limit: float, span: Mapping[str, str], *, send_secrets: bool = True, headers: Mapping[str, str] = {}
) -> AsyncIterator[Any]:
    """The answer to a request of at most `limit` seconds, by fsspec's http session with its settings.

    Follows at most REDIRECTS redirects. `span`: the header that names a range. `send_secrets`: send the user's _SECRETS
    and these `headers`. After a redirect to another server neither is sent any more.
    """
    import aiohttp
    from yarl import URL

    timeout = aiohttp.ClientTimeout(limit, sock_connect=WAIT_S, sock_read=WAIT_S)
    for redirects_left in range(REDIRECTS, -1, -1):
        session, options = await _session_and_options(send_secrets)
        secret_headers = headers if send_secrets else {}
        options["headers"] = {**options.get("headers", {}), **secret_headers, **span, "Accept-Encoding": "identity"}
        address = URL(quote(url, safe=_IN_ADDRESSES), encoded=True)
        options["allow_redirects"] = False
        async with session.get(address, timeout=timeout, auto_decompress=False, **options) as answer:
            is_redirect = answer.status in _MOVED and "Location" in answer.headers
            if not is_redirect or redirects_left == 0:
                yield answer
                return
            target = answer.url.join(URL(answer.headers["Location"], encoded=True))
            send_secrets = send_secrets and target.origin() == answer.url.origin()
        url = str(target)


async def _session_and_options(send_secrets: bool) -> tuple[Any, dict[str, Any]]:
    """fsspec's http session, and the options of its requests: the user's settings, without _SECRETS if not
    `send_secrets`."""
    from fsspec import filesystem
    from fsspec.config import conf

    def allowed(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if send_secrets or name not in _SECRETS}

    configured = allowed(conf.get("http", {}).get("client_kwargs", {}))
    system = filesystem("http", client_kwargs={"trust_env": True, **configured})  # True: HTTPS_PROXY
    return await system.set_session(), allowed(system.kwargs)


async def _receive(answer: Any, data: bytearray, size: int) -> None:
    """Add what comes to `data`, until it has `size` bytes. Raises what aiohttp raises."""
    while len(data) < size and not answer.content.at_eof():
        data += await answer.content.read(size - len(data))


def first_bytes(url: str, most: int, *, secrets: bool) -> bytes:
    """The first bytes of an object of the web, by a request that any server answers, within two minutes.

    `secrets`: send the headers that the user has set for fsspec's http, to this server alone. Raises TimeoutError,
    OSError for another status than 200, and what aiohttp raises.
    """
    from fsspec.asyn import get_loop

    async def request() -> bytes:
        data = bytearray()
        async with _http_get(url, 4 * WAIT_S, {}, send_secrets=secrets) as answer:
            if answer.status != 200:
                raise OSError(f"HTTP status {answer.status}")
            await _receive(answer, data, most)
        return bytes(data)

    limited = asyncio.wait_for(request(), 4 * WAIT_S)
    return asyncio.run_coroutine_threadsafe(limited, get_loop()).result()


async def _from_web(
    url: str, start: int, stop: int, limit: float, headers: Mapping[str, str] = {}
) -> tuple[bytes, ObjectState]:
    """Bytes start..stop that arrive within `limit` seconds, and the object's state.

    fsspec's own `_cat_file` does not serve. It reads all of an answer, however long a hostile server makes it. It
    returns neither the version of the bytes, nor the bytes that came before an error.
    """
    from aiohttp import ClientError

    span = {"Range": f"bytes={start}-{stop - 1}"}
    async with _http_get(url, limit, span, headers=headers) as answer:
        if answer.status in _TRANSIENT:
            busy = TransientError(f"http_{answer.status}")
            busy.retry_after = answer.headers.get("Retry-After", "")
            raise busy
        if answer.status == 416:
            raise SourceError("changed_shard" if start else "unreadable_shard", "shorter than it was, or empty")
        if answer.status == 200:
            raise SourceError("unreadable_shard", "the server answers no requests for ranges of bytes")
        if answer.status != 206:
            raise SourceError("missing_shard", f"HTTP status {answer.status}")
        received = _RANGE.match(answer.headers.get("Content-Range", ""))
        if received is None or int(received[1]) != start:
            raise TransientError("wrong_range", answer.headers.get("Content-Range", "no Content-Range"))
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        state = int(received[2]), version
        data = bytearray()
        size = min(stop, state[0]) - start
        with suppress(ClientError, TimeoutError):  # the next request goes on behind what came
            await _receive(answer, data, size)
    return bytes(data), state


@lru_cache(1 << 12)
def _hub_address(url: str) -> str:
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    return str(system.url(path))
