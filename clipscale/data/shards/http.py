"""Bounded GET requests: every part of an answer comes in time, and nothing is read that nobody asked for.

A server may be slow, endless or hostile. A socket's own time-out starts anew with every byte, so a timer ends what takes too long.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.cookies import extract_cookies_to_jar
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from clipscale.data.shards.access import SourceError

MOST_CONNECTIONS = 32
"""Connections that one process keeps open to one server."""
MOST_REDIRECTS = 10
SCHEMES = ("http", "https")
Sign = Callable[[requests.PreparedRequest], requests.PreparedRequest]

_sessions: dict[int, requests.Session] = {}


class TimeLimit:
    """Around reads from a connection: calls `shut`, which ends them, where a block, or a part of it, takes longer than `seconds`."""

    def __init__(self, seconds: float, shut: Callable[[], object]) -> None:
        self._seconds, self._shut = seconds, shut
        self._ended = threading.Event()
        self.late = False

    def __enter__(self) -> "TimeLimit":
        self.begin()
        threading.Thread(target=self._watch, name="time-limit", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def begin(self) -> None:
        """Another part begins, with time of its own."""
        self._until = time.monotonic() + self._seconds

    def _watch(self) -> None:
        while (left := self._until - time.monotonic()) > 0:
            if self._ended.wait(left):
                return
        self.late = True
        with suppress(OSError, ValueError, RuntimeError):  # the connection has been closed meanwhile
            self._shut()


class _InTime:
    """Part of a connection: the status and all headers come within the read time-out, or TimeoutError is raised."""

    sock: Any
    timeout: Any

    def getresponse(self) -> Any:
        error: Exception | None = None
        with TimeLimit(self.timeout, lambda: self.sock.shutdown(socket.SHUT_RDWR)) as limit:
            try:
                answer = super().getresponse()  # type: ignore[misc]  # of the connection
            except Exception as caught:
                error = caught
        if limit.late:  # headers that were cut off may look complete
            raise TimeoutError(f"no headers within {self.timeout:g} s") from error
        if error:
            raise error
        return answer


class _Plain(_InTime, HTTPConnection):
    pass


class _Secure(_InTime, HTTPSConnection):
    pass


class _PlainPool(HTTPConnectionPool):
    ConnectionCls = _Plain


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _Secure


class _Adapter(HTTPAdapter):
    """Uses these connections, directly and through a proxy."""

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = {"http": _PlainPool, "https": _SecurePool}

    def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
        manager = super().proxy_manager_for(*args, **options)
        manager.pool_classes_by_scheme = {"http": _PlainPool, "https": _SecurePool}
        return manager


def _session() -> requests.Session:
    """This process's session, which its threads share; connections must not be shared with a forked process."""
    session = _sessions.get(os.getpid())
    if session is None:
        _sessions.clear()
        session = requests.Session()
        for scheme in SCHEMES:
            session.mount(f"{scheme}://", _Adapter(pool_maxsize=MOST_CONNECTIONS))
        _sessions[os.getpid()] = session
    return session


def get(url: str, headers: Mapping[str, str], wait_s: float, sign: Sign | None = None) -> requests.Response:
    """The answer's status and headers, at most MOST_REDIRECTS redirections later; `history` has their answers.

    Its body has not been read, nor has that of a redirection, which requests would read and unpack without a bound.
    `sign` adds credentials, which only the first address's host receives. Raises SourceError, requests' errors and OSError.
    """
    session, history = _session(), list[requests.Response]()
    host = urlsplit(url).netloc
    for _ in range(MOST_REDIRECTS + 1):
        own = sign if urlsplit(url).netloc == host else None
        request = session.prepare_request(requests.Request("GET", url, headers=headers, auth=own))
        assert request.url is not None
        settings = session.merge_environment_settings(request.url, {}, True, None, None)
        answer = session.get_adapter(request.url).send(request, timeout=wait_s, **settings)
        extract_cookies_to_jar(session.cookies, request, answer.raw)
        target = session.get_redirect_target(answer)
        if target is None:
            answer.history = history
            return answer
        answer.close()
        history.append(answer)
        url = urljoin(request.url, target)
        if urlsplit(url).scheme.lower() not in SCHEMES:
            raise SourceError("missing_shard", f"redirected to {url[:200]}, which is no address of a web server")
    raise SourceError("missing_shard", f"redirected more than {MOST_REDIRECTS} times")
