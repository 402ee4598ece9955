"""Remote objects: what they are now, and any range of their bytes, from web servers and from all that fsspec knows.

An origin asks once and says what came of it; asking again is the business of whoever reads (remote.py). So that every fault is seen and
counted, the libraries' own retries are turned off.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol
from urllib.parse import quote, unquote

import requests
from requests.adapters import HTTPAdapter

from clipscale.data.shards.access import SourceError, scheme_of

SLOWEST = 1024
"""Bytes a second; an answer that comes more slowly for a time-out's length is ended and asked for again."""
SLOWEST_WHOLE = 64 << 10
"""The same of answers that come as a whole: how much longer than a time-out they may take."""
_AGAIN = {408, 425, 429, 500, 502, 503, 504}
"""HTTP statuses that may pass."""
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)$")
_HUB = re.compile(r"hf://(?:(datasets|spaces)/)?([^/@]+/[^/@]+)(?:@((?:refs/(?:pr|convert)/)?[^/]+))?/(.+)$")
_HUB_BUCKET = re.compile(r"hf://buckets/([^/]+/[^/]+)/(.+)$")
MOST_CONNECTIONS = 32
"""Kept open to one server by one process."""


Pieces = Generator[bytes, None, None]
"""An answer as it comes. To be closed by whoever gives it up: left to the collector, it might be while this thread holds a lock of the
connections'."""


class FaultError(Exception):
    """A request that failed in a way that may pass. `reason` names it among the faults counted."""

    def __init__(self, reason: str, detail: str = "", wait_s: float = 0.0) -> None:
        super().__init__(detail or reason)
        self.reason, self.wait_s = reason, wait_s


class Origin(Protocol):
    """One remote object."""

    concurrent: bool
    """Whether several threads may ask at once."""

    def about(self) -> tuple[int, str]:
        """Its size and its version (ETag, generation, time of change: whatever the server has). Raises FaultError, SourceError."""

    def read(self, start: int, stop: int, version: str, size: int) -> Pieces:
        """Bytes start..stop in pieces; SourceError `changed_shard` before any that belong to another version."""


def origin_of(url: str, wait_s: float) -> Origin:
    """The object behind an address."""
    match scheme_of(url):
        case "http" | "https":
            return HttpOrigin(url, wait_s)
        case "gs" | "gcs":
            return _google(url, wait_s)
        case "hf":
            return _hub(url, wait_s)
        case _:
            return FsspecOrigin(url, wait_s)


def is_concurrent(url: str) -> bool:
    """Whether objects of this scheme may be asked for by several threads at once; some of fsspec's file systems have one connection."""
    from fsspec import get_filesystem_class

    scheme = scheme_of(url)
    return scheme in ("http", "https", "gs", "gcs", "hf") or bool(get_filesystem_class(scheme).async_impl)


# -- by https ----------------------------------------------------------------------------------------------------------

_sessions: dict[int, requests.Session] = {}


def _session() -> requests.Session:
    """One a process: connections must not be shared with a fork. Threads may ask at once."""
    session = _sessions.get(os.getpid())
    if session is None:
        _sessions.clear()
        session = requests.Session()
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(pool_maxsize=MOST_CONNECTIONS))
        _sessions[os.getpid()] = session
    return session


Sign = Callable[[Any], None]
"""Adds to a request's headers what permits it."""


def _google(url: str, wait_s: float) -> "HttpOrigin":
    """A gs:// object, with the credentials that gcsfs finds."""
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    return HttpOrigin(system.url(path), wait_s, system.credentials.apply)


def _hub(url: str, wait_s: float) -> "HttpOrigin":
    """A file on the Hugging Face hub, hf://[datasets|spaces/]OWNER/NAME[@REVISION]/PATH, with the user's token."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    if bucket := _HUB_BUCKET.match(url):
        address = f"{constants.ENDPOINT}/buckets/{bucket[1]}/resolve/{quote(bucket[2])}"
    elif named := _HUB.match(url):
        kind, revision = named[1].removesuffix("s") if named[1] else None, unquote(named[3]) if named[3] else None
        address = hf_hub_url(named[2], named[4], repo_type=kind, revision=revision)
    else:
        raise SourceError("missing_shard", "not of the form hf://datasets/OWNER/NAME[@REVISION]/PATH")
    return HttpOrigin(address, wait_s, lambda headers: headers.update(build_hf_headers()))


class HttpOrigin:
    """An object on a web server. Servers without ranges are read from the start and what was there before is passed over."""

    concurrent = True

    def __init__(self, url: str, wait_s: float, sign: Sign | None = None) -> None:
        self._url, self._wait_s, self._sign = url, wait_s, sign

    def about(self) -> tuple[int, str]:
        # not HEAD: addresses that are signed for GET refuse it
        with self._get(0, 1) as answer:
            found = self._size(answer, 0), self._version(answer)
            if answer.status_code == 206:
                answer.raw.read(decode_content=False)  # what is read to its end leaves the connection open for the next
            return found

    def read(self, start: int, stop: int, version: str, size: int) -> Pieces:
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
        auth = self._signed if self._sign else None  # not among the headers, where ~/.netrc would replace it
        try:
            answer = _session().get(self._url, headers=headers, stream=True, timeout=self._wait_s, auth=auth)
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

    def _signed(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        assert self._sign is not None
        try:
            self._sign(request.headers)
        except Exception as error:  # each library that keeps credentials has its own
            raise FaultError("failed_sign_in", f"{type(error).__name__}: {error}") from error
        return request

    @staticmethod
    def _version(answer: requests.Response) -> str:
        """The hub says it where it redirects to the store. Google's ETag changes with an object's metadata, its generation does not."""
        for said in (*answer.history, answer):
            for name in ("X-Linked-ETag", "X-Goog-Generation"):
                if name in said.headers:
                    return said.headers[name]
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
    """An object of S3, or of anything else that fsspec knows.

    Credentials, endpoints and the like come from each library's own environment variables and files, or from fsspec's. Time-outs are ours:
    most file systems have none. One that knows no asyncio is asked by a thread, which is left behind, and its connection with it, where no
    answer comes.
    """

    def __init__(self, url: str, wait_s: float) -> None:
        self._url, self._wait_s = url, wait_s
        self._fs: Any = None
        self._path = ""
        self.concurrent = is_concurrent(url)

    def about(self) -> tuple[int, str]:
        info = self._ask("info")
        version = [
            str(info[name])
            for name in ("ETag", "etag", "generation", "mtime", "LastModified", "updated", "created")
            if info.get(name) is not None
        ]
        if info.get("size") is None:
            raise SourceError("unknown_length", "the server does not say how long it is")
        return int(info["size"]), version[0] if version else ""

    def read(self, start: int, stop: int, version: str, size: int) -> Pieces:
        data = self._ask("cat_file", start=start, end=stop)
        # asked after reading: what still has the first version then had it while it was read
        if self.about() != (size, version):
            raise SourceError("changed_shard", "it changed on the server while it was read")
        if len(data) > stop - start:
            raise FaultError("wrong_range", f"{len(data)} bytes for {stop - start}")
        yield data
        if len(data) < stop - start:
            raise FaultError("short_answer", f"{stop - start - len(data)} bytes missing")

    def _ask(self, method: str, start: int = 0, end: int = 0) -> Any:
        """What the file system's method says of the object, or of those of its bytes."""
        limit_s = self._wait_s + (end - start) / SLOWEST_WHOLE
        span = {"start": start, "end": end} if end else {}
        try:
            if self._fs is None:
                self._fs, self._path = _file_system(self._url, self._wait_s)
            if getattr(self._fs, "async_impl", False):
                from fsspec.asyn import sync

                return sync(self._fs.loop, getattr(self._fs, f"_{method}"), self._path, timeout=limit_s, **span)
            return _within(limit_s, partial(getattr(self._fs, method), self._path, **span))
        except (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError) as error:
            raise SourceError("missing_shard", f"{type(error).__name__}: {error}") from error
        except TimeoutError as error:
            if self._fs is not None and not self.concurrent:
                type(self._fs).clear_instance_cache()  # its one connection still waits
                self._fs = None
            raise FaultError("no_answer", f"none within {limit_s:.0f} s") from error
        except Exception as error:  # each library has its own; all are asked again, a bounded number of times
            raise FaultError("failed_request", f"{type(error).__name__}: {error}") from error


def _within(limit_s: float, question: Callable[[], Any]) -> Any:
    """The answer of what may never come back. Raises TimeoutError, and what the question raises."""
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as error:  # raised where the answer is awaited
            answer.set_exception(error)

    threading.Thread(target=ask, name="ask", daemon=True).start()
    return answer.result(limit_s)


def _file_system(url: str, wait_s: float) -> tuple[Any, str]:
    """What reads an address, and the object's path there. S3's is to ask once: botocore would ask five times, and s3fs as often again."""
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    if scheme_of(url) not in ("s3", "s3a"):
        return url_to_fs(url, use_listings_cache=False)
    own = conf.get("s3", {}).get("config_kwargs", {})
    ours = {"retries": {"total_max_attempts": 1}, "read_timeout": wait_s, "connect_timeout": wait_s}
    system, path = url_to_fs(url, use_listings_cache=False, config_kwargs={**own, **ours})
    system.retries = 1
    return system, path
