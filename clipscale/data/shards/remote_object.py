"""Remote objects through fsspec: their size and version now, and any range of their bytes.

A request is a coroutine on fsspec's event loop. A failure that may pass raises TransientError; `Retry` counts it and
waits before the next attempt. The libraries' own retries are off, so every failure is counted.

fsspec's `cat_file` lacks what https, gs and hf need: the part of an answer that came before a fault, the version of the
bytes, and bounds on them. So `HttpObject` reads the answers of fsspec's own http session.
"""

import asyncio
import os
import random
import re
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote

import certifi

from clipscale.common.units import whole_number
from clipscale.data.shards.access import ReadContext, SourceError, scheme_of

if TYPE_CHECKING:  # local shards need no web client
    from aiohttp import ClientHandlerType, ClientRequest, ClientResponse

TICK_S = 0.1
"""Interval at which a reader that waits for a request calls `tick`."""
SLOWEST = 1024
"""Bytes a second; an answer slower than this over the length of a time-out is cut off and requested again."""
SLOWEST_WHOLE = 64 << 10
"""Bytes a second by which the time-out of a request through fsspec grows, whose answer comes as a whole."""
LONGEST_WAIT_S = 30.0
"""Bound on the wait between two attempts."""
PROGRESS = 1 / 16
"""Share of a request that is progress. A server that sends one byte a request must not hold a reader for good."""
PIECE = 1 << 20
"""Bytes of an answer that are taken at once."""
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
"""HTTP statuses that may pass."""
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})$")
_HUB = re.compile(r"hf://(?:(datasets|spaces)/)?([^/@]+/[^/@]+)(?:@((?:refs/(?:pr|convert)/)?[^/]+))?/(.+)$")
_HUB_BUCKET = re.compile(r"hf://buckets/([^/]+/[^/]+)/(.+)$")
MOST_REDIRECTIONS = 10
_IN_ADDRESSES = "!#$%&'()*+,/:;=?@[]~"
"""Characters of an address that are sent as they are, since it may be signed; others, such as spaces, are quoted."""
T = TypeVar("T")
State = tuple[int, str]
"""Size and version (ETag, generation, time of change) of an object: they identify its content."""


class TransientError(Exception):
    """A request failed in a way that may pass. `reason` names its counter; `wait_s` is the wait the server asks for."""

    def __init__(self, reason: str, detail: str = "", wait_s: float = 0.0) -> None:
        super().__init__(detail or reason)
        self.reason, self.wait_s = reason, wait_s


def submit(request: Coroutine[Any, Any, T]) -> Future[T]:
    """Begin a request, in the thread of fsspec's event loop."""
    from fsspec.asyn import get_loop

    return asyncio.run_coroutine_threadsafe(request, get_loop())


def in_thread(call: Callable[[], T], name: str = "fsspec-call") -> Future[T]:
    """Begin a call in a thread of its own, which is left alone if it never returns."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # raised where the answer is awaited
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


def result(future: Future[T], tick: Callable[[], None]) -> T:
    """Wait for a request. Raises what it raises, or `tick`, which ends it."""
    try:
        while not wait([future], TICK_S).done:
            tick()
        return future.result()
    finally:
        future.cancel()


class Retry:
    """Counts the failures of one operation, and waits before each new attempt."""

    def __init__(self, context: ReadContext) -> None:
        self._context, self._failures = context, 0

    def wait(self, error: TransientError, gained: float = 0.0) -> None:
        """Wait longer after each failure without progress, for a random time, so that readers do not return all at
        once. `gained` is the share of the request that came before it failed; PROGRESS of it count as progress.

        Raises SourceError `unreachable_shard` after too many of them.
        """
        self._context.count(error.reason)
        self._context.tick()
        self._failures = 0 if gained >= PROGRESS else self._failures + 1
        if self._failures > self._context.access.retries:
            raise SourceError("unreachable_shard", f"{self._failures} requests failed, the last: {error}") from error
        longest = min(0.25 * 2 ** min(self._failures, 30), LONGEST_WAIT_S)  # 2**1026 is no float
        time.sleep(max(random.uniform(0, longest), min(error.wait_s, LONGEST_WAIT_S)))

    def stat(self, remote: "RemoteObject") -> State:
        """The object's size and version, after as many attempts as it takes."""
        while True:
            try:
                return result(submit(remote.stat()), self._context.tick)
            except TransientError as error:
                self.wait(error)


def remote_object(url: str, wait_s: float) -> "RemoteObject":
    """The object at an address; requests time out after `wait_s`. Raises SourceError for an address that nothing here reads."""
    try:
        match scheme_of(url):
            case "http" | "https":
                return HttpObject(url, wait_s)
            case "gs" | "gcs":
                from fsspec.core import url_to_fs

                system, path = url_to_fs(url)
                return HttpObject(system.url(path), wait_s, system.credentials.apply)
            case "hf":
                from huggingface_hub.utils import build_hf_headers

                return HttpObject(_hub_address(url), wait_s, lambda headers: headers.update(build_hf_headers()))
        return FsspecObject(url, wait_s)
    except (ImportError, ValueError) as error:  # a package that is missing, or a scheme that fsspec does not know
        raise SourceError("missing_shard", f"{scheme_of(url)}: addresses cannot be read: {error}") from error


def is_concurrent(url: str) -> bool:
    """Whether several threads may read objects of this scheme at once; some file systems have one connection."""
    from fsspec import get_filesystem_class

    scheme = scheme_of(url)
    return scheme in ("http", "https", "gs", "gcs", "hf") or bool(get_filesystem_class(scheme).async_impl)


@cache
def _certificates() -> ssl.SSLContext:
    """Trusts the bundle that the environment names as requests and curl have it, or OpenSSL's and certifi's certificates."""
    named = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    if named:
        return ssl.create_default_context(cafile=named)
    context = ssl.create_default_context()
    if not (os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")):
        context.load_verify_locations(certifi.where())  # OpenSSL of some Pythons has none
    return context


def _hub_address(url: str) -> str:
    """The https address of hf://[datasets|spaces/]OWNER/NAME[@REVISION]/PATH or hf://buckets/OWNER/NAME/PATH."""
    from huggingface_hub import constants, hf_hub_url

    if bucket := _HUB_BUCKET.match(url):
        return f"{constants.ENDPOINT}/buckets/{bucket[1]}/resolve/{quote(bucket[2])}"
    if named := _HUB.match(url):
        kind, revision = named[1].removesuffix("s") if named[1] else None, unquote(named[3]) if named[3] else None
        return hf_hub_url(named[2], named[4], repo_type=kind, revision=revision)
    raise SourceError("missing_shard", "not of the form hf://datasets/OWNER/NAME[@REVISION]/PATH")


# -- https, gs, hf -----------------------------------------------------------------------------------------------------


class HttpObject:
    """An object on a web server, on Google's storage or on the Hugging Face hub.

    Every part of an answer comes in time, and nothing is read that nobody asked for: a server may be slow, endless or
    hostile. One that knows no ranges is read from its start.
    """

    concurrent = True

    def __init__(self, url: str, wait_s: float, sign: Callable[[Any], object] | None = None) -> None:
        """`sign` adds the credentials to a request's headers; no other server receives them."""
        self._url, self._wait_s, self._sign = url, wait_s, sign

    async def stat(self) -> State:
        """Its size and version now. Raises TransientError, and SourceError for what does not pass."""
        # not HEAD: addresses that are signed for GET refuse it
        async with self._get(0, 1) as answer:
            found = self._size(answer, 0), self._version(answer)
            if answer.status == 206:
                await self._piece(answer, 1)  # an answer read to its end leaves the connection open for the next
            return found

    async def read(self, start: int, stop: int, state: State, pieces: list[bytes]) -> None:
        """Add bytes start..stop to `pieces` as they come; raises SourceError `changed_shard` before one of another state."""
        async with self._get(start, stop) as answer:
            if (self._size(answer, start), self._version(answer)) != state:
                raise SourceError("changed_shard", "it changed on the server while it was read")
            left, skipped = stop - start, start if answer.status == 200 else 0
            begun, received = time.monotonic(), 0
            while left > 0:
                data = await self._piece(answer, min(skipped or left, PIECE))
                if not data:
                    raise TransientError("short_answer", f"{left} bytes missing")
                received += len(data)
                if (passed := time.monotonic() - begun) > self._wait_s:
                    if received < SLOWEST * passed:
                        raise TransientError("slow_answer", f"{received} bytes in {passed:.0f} s")
                    begun, received = time.monotonic(), 0
                if skipped:
                    skipped -= len(data)
                else:
                    left -= len(data)
                    pieces.append(data)

    async def _piece(self, answer: "ClientResponse", most: int) -> bytes:
        """The next bytes of the body, none at its end."""
        try:
            async with asyncio.timeout(self._wait_s):
                return await answer.content.read(most)
        except TimeoutError as error:
            raise TransientError("dropped_connection", f"nothing more within {self._wait_s:g} s") from error
        except Exception as error:  # aiohttp, ssl and sockets all have their own
            raise TransientError("dropped_connection", f"{type(error).__name__}: {error}") from error

    @asynccontextmanager
    async def _get(self, start: int, stop: int) -> AsyncIterator["ClientResponse"]:
        """The answer's status and headers, redirections later. No body has been read, nor is one unpacked."""
        import aiohttp

        try:
            async with asyncio.timeout(self._wait_s):
                answer = await self._send(start, stop)
        except (SourceError, TransientError):
            raise
        except TimeoutError as error:
            raise TransientError("no_connection", f"no answer within {self._wait_s:g} s") from error
        except aiohttp.ClientSSLError as error:  # some are also ValueErrors
            raise TransientError("no_connection", f"{type(error).__name__}: {error}") from error
        except (ValueError, aiohttp.NonHttpUrlClientError, aiohttp.TooManyRedirects) as error:  # also of a redirection
            raise SourceError("missing_shard", f"{type(error).__name__}: {str(error)[:200]}") from error
        except Exception as error:  # aiohttp, ssl and sockets all have their own
            raise TransientError("no_connection", f"{type(error).__name__}: {error}") from error
        try:
            if answer.status in _TRANSIENT:
                wait = whole_number(answer.headers.get("Retry-After", ""))
                raise TransientError(f"http_{answer.status}", wait_s=float(wait or 0))
            if answer.status == 416:
                raise SourceError("changed_shard" if start else "unreadable_shard", "shorter than it was, or empty")
            if answer.status not in (200, 206):
                raise SourceError("missing_shard", f"HTTP status {answer.status}")
            yield answer
        finally:
            answer.release()

    async def _send(self, start: int, stop: int) -> "ClientResponse":
        """Ask fsspec's session for bytes start..stop, with the settings of fsspec's configuration."""
        import aiohttp
        from fsspec import filesystem
        from fsspec.config import conf

        own = conf.get("http", {}).get("client_kwargs", {})
        ours = {"trust_env": True, "requote_redirect_url": False}  # proxies; addresses that are signed as they are
        system = filesystem("http", client_kwargs={**ours, **own}, encoded=True)
        session = await system.set_session()
        session._retry_connection = False  # it would not be counted
        options: dict[str, Any] = {"ssl": _certificates(), **system.kwargs}
        configured = options.get("headers", {})
        secret = {"Authorization", *own.get("headers", ()), *configured, *(["Cookie"] if "cookies" in own else [])}
        options |= {
            "headers": {**configured, "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"},
            "auto_decompress": False,
            "timeout": aiohttp.ClientTimeout(),
            "max_redirects": MOST_REDIRECTIONS + 1,
            "middlewares": [partial(self._signed, secret)],
        }
        answer: ClientResponse = await session.get(system.encode_url(quote(self._url, safe=_IN_ADDRESSES)), **options)
        return answer

    async def _signed(self, secret: set[str], request: "ClientRequest", send: "ClientHandlerType") -> "ClientResponse":
        """Send a request, with credentials if it is for the server they are for. `secret` headers are those of fsspec's
        configuration, and Authorization, which may come from there or from ~/.netrc: our own replace them."""
        is_own = request.url.origin() == type(request.url)(self._url).origin()
        if self._sign or not is_own:
            for name in secret:
                request.headers.pop(name, None)
        if self._sign and is_own:
            try:
                await asyncio.wrap_future(in_thread(partial(self._sign, request.headers)))
            except Exception as error:  # each library that keeps credentials has its own
                raise TransientError("failed_sign_in", f"{type(error).__name__}: {error}") from error
        return await send(request)

    @staticmethod
    def _version(answer: "ClientResponse") -> str:
        """The hub sends it with a redirection. Google's ETag changes with the metadata, its generation does not."""
        for response in (*answer.history, answer):
            for name in ("X-Linked-ETag", "X-Goog-Generation"):
                if name in response.headers:
                    return response.headers[name]
        return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""

    @staticmethod
    def _size(answer: "ClientResponse", start: int) -> int:
        if answer.status == 206:
            found = _RANGE.match(answer.headers.get("Content-Range", ""))
            if not found or int(found[1]) != start:
                raise TransientError("wrong_range", answer.headers.get("Content-Range", "no Content-Range"))
            return int(found[3])
        length = whole_number(answer.headers.get("Content-Length", ""))
        if length is None:
            raise SourceError("unknown_length", "the server does not say how long it is")
        return length


# -- any other file system of fsspec -----------------------------------------------------------------------------------


class FsspecObject:
    """An object of S3, or of any other file system of fsspec.

    Each library finds its credentials and endpoints in its own environment variables and files, or in fsspec's.
    Time-outs are set here, since most file systems have none. One without asyncio is called in a thread; a call that
    never returns is abandoned with its connection.
    """

    def __init__(self, url: str, wait_s: float) -> None:
        self._url, self._wait_s = url, wait_s
        self._fs: Any = None
        self._path = ""
        self.concurrent = is_concurrent(url)

    async def stat(self) -> State:
        """As HttpObject does."""
        info = await self._call("info")
        names = ("ETag", "etag", "generation", "mtime", "LastModified", "updated", "created")
        if info.get("size") is None:
            raise SourceError("unknown_length", "the server does not say how long it is")
        return int(info["size"]), next((str(info[name]) for name in names if info.get(name) is not None), "")

    async def read(self, start: int, stop: int, state: State, pieces: list[bytes]) -> None:
        """As HttpObject does, all at once."""
        data = await self._call("cat_file", start=start, end=stop)
        # after reading: an object that still has the first version had it during the read
        if await self.stat() != state:
            raise SourceError("changed_shard", "it changed on the server while it was read")
        if len(data) > stop - start:
            raise TransientError("wrong_range", f"{len(data)} bytes for {stop - start}")
        pieces.append(data)
        if len(data) < stop - start:
            raise TransientError("short_answer", f"{stop - start - len(data)} bytes missing")

    async def _call(self, method: str, **span: int) -> Any:
        """Call the file system's method on the object, or on this range of its bytes."""
        limit_s = self._wait_s + (span["end"] - span["start"] if span else 0) / SLOWEST_WHOLE
        try:
            if self._fs is None:
                opened = partial(_file_system, self._url, self._wait_s)
                self._fs, self._path = opened() if self.concurrent else await asyncio.wrap_future(in_thread(opened))
            if self.concurrent:
                call = getattr(self._fs, f"_{method}")(self._path, **span)
            else:
                call = asyncio.wrap_future(in_thread(partial(getattr(self._fs, method), self._path, **span)))
            return await asyncio.wait_for(call, limit_s)
        except (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError) as error:
            raise SourceError("missing_shard", f"{type(error).__name__}: {error}") from error
        except TimeoutError as error:
            if self._fs is not None and not self.concurrent:
                type(self._fs).clear_instance_cache()  # its one connection still waits
                self._fs = None
            raise TransientError("no_answer", f"none within {limit_s:.0f} s") from error
        except Exception as error:  # each library has its own; all are retried, a bounded number of times
            raise TransientError("failed_request", f"{type(error).__name__}: {error}") from error


RemoteObject = HttpObject | FsspecObject


def _file_system(url: str, wait_s: float) -> tuple[Any, str]:
    """The file system of an address, and the path there. Turns off the retries of botocore and of s3fs (five each)."""
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    if scheme_of(url) not in ("s3", "s3a"):
        return url_to_fs(url, use_listings_cache=False)
    own = conf.get("s3", {}).get("config_kwargs", {})
    ours = {"retries": {"total_max_attempts": 1}, "read_timeout": wait_s, "connect_timeout": wait_s}
    system, path = url_to_fs(url, use_listings_cache=False, config_kwargs={**own, **ours})
    system.retries = 1
    return system, path
