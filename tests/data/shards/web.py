"""A web server with injected faults: serves a folder, with ranges, or forwards to another server."""

import http.client
import http.server
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from clipscale.data.shards.access import EVENT, Access
from clipscale.data.shards.store import Store

if TYPE_CHECKING:  # not loaded by processes that only fetch
    from clipscale.data.loader.stream import TrainStream

FAULTS = ("503", "drop", "cut", "slow", "short", "wrong_range")
"""Faults of an answer: refused, ended halfway or before it begins, slow, too short, another range."""


class Web:
    """`faults(number, path)` returns the fault of the answer to request `number`, or None."""

    def __init__(self, folder: Path | None = None, upstream: int | None = None) -> None:
        self.folder, self.upstream = folder, upstream
        self.faults: Callable[[int, str], str | None] = lambda number, path: None
        self.ranges = True
        self.requests: list[tuple[str, str]] = []
        self.done: Counter[str] = Counter()
        self.url = ""

    def answer(
        self, path: str, asked: str, method: str = "GET", sent: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body without a fault; `sent` are the request's headers."""
        if self.upstream is not None:
            connection = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=10)
            own = {k: v for k, v in (sent or {}).items() if k.lower() not in ("host", "connection", "accept-encoding")}
            connection.request(method, path, headers=own)
            got = connection.getresponse()
            body = got.read()
            kept = {
                k: v for k, v in got.getheaders() if k in ("ETag", "Last-Modified", "Content-Range", "Content-Length")
            }
            connection.close()
            return got.status, kept, body
        assert self.folder is not None
        file = self.folder / unquote(path).lstrip("/")
        if not file.is_file():
            return 404, {"Content-Length": "0"}, b""
        data = file.read_bytes()
        headers = {"ETag": f'"{file.stat().st_mtime_ns:x}-{len(data):x}"'}
        match = re.match(r"bytes=(\d+)-(\d+)$", asked)
        if not match or not self.ranges:
            return 200, headers | {"Content-Length": str(len(data))}, data
        start, stop = int(match[1]), min(int(match[2]) + 1, len(data))
        if start >= len(data):
            return 416, {"Content-Range": f"bytes */{len(data)}", "Content-Length": "0"}, b""
        headers |= {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}", "Content-Length": str(stop - start)}
        return 206, headers, data[start:stop]


def fetch_often(url: str, cache: str, bound: int, times: int) -> None:
    """Open a shard's local copy `times` times; for several processes at once."""
    contents = set()
    for _ in range(times):
        stream = Store(Access(cache, bound)).open(url).stream
        contents.add(stream.read())
        stream.close()
    assert len(contents) == 1, "copies differ"


def settle(store: Store) -> None:
    """Wait for the end of dropped prefetches, and count their faults."""
    until = time.monotonic() + 10
    while any(thread.name.startswith("prefetch-") for thread in threading.enumerate()):
        assert time.monotonic() < until, "a thread is left"
        time.sleep(0.002)
    store.collect()


def finish(stream: "TrainStream") -> int:
    """Close a stream without workers and return the number of faults it counted, those of dropped prefetches included."""
    from clipscale.data.loader.workers import InProcess

    stream.close()
    workers = stream._assembler.workers
    assert isinstance(workers, InProcess)
    for shard_stream in workers.filler.streams:
        for reader in getattr(shard_stream.reader, "_readers", {0: shard_stream.reader}).values():
            settle(reader._store)
    return stream.seen.total() + sum(n for reason, n in workers.filler.counts.items() if reason.startswith(EVENT))


@contextmanager
def serving(web: Web) -> Iterator[Web]:
    """The server, on a free port of this machine."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = 1 << 20

        def do_HEAD(self) -> None:
            status, headers, _ = web.answer(self.path, "", "HEAD", self.headers)
            web.requests.append((self.path, "HEAD"))
            if web.faults(len(web.requests) - 1, self.path):
                web.done["503"] += 1
                status, headers = 503, {"Content-Length": "0"}
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:
            number = len(web.requests)
            asked = self.headers.get("Range", "")
            web.requests.append((self.path, asked))
            fault = web.faults(number, self.path)
            status, headers, body = (
                (503, {"Content-Length": "0"}, b"")
                if fault == "503"
                else web.answer(self.path, asked, "GET", self.headers)
            )
            if fault in ("short", "drop") and len(body) < 2:
                fault = None  # would not be noticed
            if fault:
                web.done[fault] += 1
            if fault == "short":
                body = body[: len(body) // 2]
                headers["Content-Length"] = str(len(body))
            if fault == "wrong_range" and "Content-Range" in headers:
                headers["Content-Range"] = re.sub(
                    r"bytes (\d+)", lambda m: f"bytes {int(m[1]) + 7}", headers["Content-Range"]
                )
            if fault == "cut":
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if fault == "drop":
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
                return
            piece = 64 if fault == "trickle" else 1 << 16
            for at in range(0, len(body), piece):
                self.wfile.write(body[at : at + piece])
                if fault in ("slow", "trickle"):
                    self.wfile.flush()
                    time.sleep(0.02)

        def log_message(self, *_: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # clients leave in mid-answer, which is tested

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        web.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield web
        finally:  # else its thread asks a closed socket without a pause, for the rest of the tests
            server.shutdown()
            thread.join()
