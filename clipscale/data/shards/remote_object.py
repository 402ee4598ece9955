"""Remote objects: their size and version now, and any range of their bytes.

One method call is one request. A failure that may pass raises TransientError; `Retry` counts it and waits before the
next attempt. The libraries' own retries are off, so every failure is counted.
"""

import random
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import requests

from clipscale.data.shards.access import ReadContext, SourceError, scheme_of
from clipscale.data.shards.http import TimeLimit, get
from clipscale.units import whole_number

SLOWEST = 1024
"""Bytes a second; an answer slower than this over the length of a time-out is cut off and requested again."""
SLOWEST_WHOLE = 64 << 10
"""Bytes a second by which the time-out of a request through fsspec grows, whose answer comes as a whole."""
LONGEST_WAIT_S = 30.0
"""Bound on the wait between two attempts."""
PROGRESS = 1 / 16
"""Share of a request that is progress. A server that sends one byte a request must not hold a reader for good."""
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
"""HTTP statuses that may pass."""
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})$")
_HUB = re.compile(r"hf://(?:(datasets|spaces)/)?([^/@]+/[^/@]+)(?:@((?:refs/(?:pr|convert)/)?[^/]+))?/(.+)$")
_HUB_BUCKET = re.compile(r"hf://buckets/([^/]+/[^/]+)/(.+)$")

T = TypeVar("T")
Pieces = Generator[bytes, None, None]
"""An answer as it arrives. Always closed explicitly: the collector could do so while a connection's lock is held."""


class TransientError(Exception):
    """A request failed in a way that may pass. `reason` names its counter; `wait_s` is the wait the server asks for."""

    def __init__(self, reason: str, detail: str = "", wait_s: float = 0.0) -> None:
        super().__init__(detail or reason)
        self.reason, self.wait_s = reason, wait_s


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

    def call(self, request: Callable[[], T]) -> T:
        """The request's answer, after as many attempts as it takes."""
        while True:
            try:
                return request()
            except TransientError as error:
                self.wait(error)


def remote_object(url: str, wait_s: float) -> "RemoteObject":
    """The object at an address; requests time out after `wait_s`. Raises SourceError for an address that nothing here reads."""
    try:
        return _remote_object(url, wait_s)
    except (ImportError, ValueError) as error:  # a package that is missing, or a scheme that fsspec does not know
        raise SourceError("missing_shard", f"{scheme_of(url)}: addresses cannot be read: {error}") from error


def _remote_object(url: str, wait_s: float) -> "RemoteObject":
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
        case _:
            return FsspecObject(url, wait_s)


def is_concurrent(url: str) -> bool:
    """Whether several threads may read objects of this scheme at once; some file systems have one connection."""
    from fsspec import get_filesystem_class

    scheme = scheme_of(url)
    return scheme in ("http", "https", "gs", "gcs", "hf") or bool(get_filesystem_class(scheme).async_impl)


def _hub_address(url: str) -> str:
    """The https address of hf://[datasets|spaces/]OWNER/NAME[@REVISION]/PATH or hf://buckets/OWNER/NAME/PATH."""
    from huggingface_hub import constants, hf_hub_url

    if bucket := _HUB_BUCKET.match(url):
        return f"{constants.ENDPOINT}/buckets/{bucket[1]}/resolve/{quote(bucket[2])}"
    if named := _HUB.match(url):
        kind, revision = named[1].removesuffix("s") if named[1] else None, unquote(named[3]) if named[3] else None
        return hf_hub_url(named[2], named[4], repo_type=kind, revision=revision)
    raise SourceError("missing_shard", "not of the form hf://datasets/OWNER/NAME[@REVISION]/PATH")


# -- through https -----------------------------------------------------------------------------------------------------


@contextmanager
def _dropped_is_transient() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # urllib3, http.client, ssl and socket all have their own
        raise TransientError("dropped_connection", f"{type(error).__name__}: {error}") from error


class HttpObject:
    """An object on a web server, on Google's storage or on the Hugging Face hub.

    Not through fsspec, which drops the part of an answer that came before a fault, does not return the version (ETag)
    of the bytes it read, and takes the start of the whole object for the range where a server knows no ranges. Here
    such a server is read from its start.
    """

    concurrent = True
    """Whether several threads may send requests at once."""

    def __init__(self, url: str, wait_s: float, sign: Callable[[Any], None] | None = None) -> None:
        """`sign` adds the credentials to a request's headers."""
        self._url, self._wait_s, self._sign = url, wait_s, sign

    def stat(self) -> tuple[int, str]:
        """Its size and version (ETag, generation, time of change). Raises TransientError, SourceError."""
        # not HEAD: addresses that are signed for GET refuse it
        with self._get(0, 1) as answer:
            found = self._size(answer, 0), self._version(answer)
            if answer.status_code == 206 and answer.headers.get("Content-Length") == "1":
                # an answer read to its end leaves the connection open for the next
                with _dropped_is_transient(), TimeLimit(self._wait_s, answer.raw.shutdown):
                    answer.raw.read(1, decode_content=False)
            return found

    def read(self, start: int, stop: int, version: str, size: int) -> Pieces:
        """Bytes start..stop in pieces; raises SourceError `changed_shard` before any byte of another version."""
        # the socket's own time-out starts anew with every byte, also with those around the chunks of a body
        with self._get(start, stop) as answer, TimeLimit(2 * self._wait_s, answer.raw.shutdown) as limit:
            if self._version(answer) != version or self._size(answer, start) != size:
                raise SourceError("changed_shard", "it changed on the server while it was read")
            left, skipped = stop - start, start if answer.status_code == 200 else 0
            begun, received = time.monotonic(), 0
            while left > 0:
                limit.begin()
                with _dropped_is_transient():
                    data = answer.raw.read1(min(skipped or left, 1 << 16), decode_content=False)
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
                    yield data

    def _get(self, start: int, stop: int) -> requests.Response:
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        auth = self._signed if self._sign else None  # not among the headers, where ~/.netrc would replace it
        try:
            answer = get(self._url, headers, self._wait_s, auth)
        except (SourceError, TransientError):
            raise
        except ValueError as error:  # an address, also one that a redirection gives, that is none
            raise SourceError("missing_shard", str(error)) from error
        except Exception as error:  # urllib3, http.client, ssl and socket all have their own
            raise TransientError("no_connection", f"{type(error).__name__}: {error}") from error
        if answer.status_code in (200, 206):
            return answer
        answer.close()
        if answer.status_code in _TRANSIENT:
            wait = whole_number(answer.headers.get("Retry-After", ""))
            raise TransientError(f"http_{answer.status_code}", wait_s=float(wait or 0))
        if answer.status_code == 416:
            raise SourceError("changed_shard" if start else "unreadable_shard", "shorter than it was, or empty")
        raise SourceError("missing_shard", f"HTTP status {answer.status_code}")

    def _signed(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        assert self._sign is not None
        try:
            self._sign(request.headers)
        except Exception as error:  # each library that keeps credentials has its own
            raise TransientError("failed_sign_in", f"{type(error).__name__}: {error}") from error
        return request

    @staticmethod
    def _version(answer: requests.Response) -> str:
        """The hub sends it with a redirection. Google's ETag changes with the metadata, its generation does not."""
        for response in (*answer.history, answer):
            for name in ("X-Linked-ETag", "X-Goog-Generation"):
                if name in response.headers:
                    return response.headers[name]
        return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""

    @staticmethod
    def _size(answer: requests.Response, start: int) -> int:
        if answer.status_code == 206:
            found = _RANGE.match(answer.headers.get("Content-Range", ""))
            if not found or int(found[1]) != start:
                answer.close()
                raise TransientError("wrong_range", answer.headers.get("Content-Range", "no Content-Range"))
            return int(found[3])
        length = whole_number(answer.headers.get("Content-Length", ""))
        if length is None:
            answer.close()
            raise SourceError("unknown_length", "the server does not say how long it is")
        return length


# -- through fsspec ----------------------------------------------------------------------------------------------------


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

    def stat(self) -> tuple[int, str]:
        """As HttpObject does."""
        info = self._call("info")
        names = ("ETag", "etag", "generation", "mtime", "LastModified", "updated", "created")
        if info.get("size") is None:
            raise SourceError("unknown_length", "the server does not say how long it is")
        return int(info["size"]), next((str(info[name]) for name in names if info.get(name) is not None), "")

    def read(self, start: int, stop: int, version: str, size: int) -> Pieces:
        """As HttpObject does."""
        data = self._call("cat_file", start=start, end=stop)
        # after reading: an object that still has the first version had it during the read
        if self.stat() != (size, version):
            raise SourceError("changed_shard", "it changed on the server while it was read")
        if len(data) > stop - start:
            raise TransientError("wrong_range", f"{len(data)} bytes for {stop - start}")
        yield data
        if len(data) < stop - start:
            raise TransientError("short_answer", f"{stop - start - len(data)} bytes missing")

    def _call(self, method: str, start: int = 0, end: int = 0) -> Any:
        """Call the file system's method on the object, or on this range of its bytes."""
        limit_s = self._wait_s + (end - start) / SLOWEST_WHOLE
        span = {"start": start, "end": end} if end else {}
        try:
            if self._fs is None:
                self._fs, self._path = _file_system(self._url, self._wait_s)
            if getattr(self._fs, "async_impl", False):
                from fsspec.asyn import sync

                return sync(self._fs.loop, getattr(self._fs, f"_{method}"), self._path, timeout=limit_s, **span)
            return within(limit_s, partial(getattr(self._fs, method), self._path, **span))
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


def within(limit_s: float, call: Callable[[], Any]) -> Any:
    """The result of a call that may never return. Raises TimeoutError, and what the call raises."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # raised where the answer is awaited
            answer.set_exception(error)

    threading.Thread(target=run, name="fsspec-call", daemon=True).start()
    return answer.result(limit_s)


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
