"""A web server with injected faults, which answers requests for ranges of a folder's files."""

import http.server
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

# Faults of an answer: refused, ended halfway or before it begins, too short, another range. Others: `stall` sends
# nothing for two seconds, `silent` nothing until the server ends, `slow` PIECE bytes every hundredth of a second,
# `drip` a byte, `429` asks for a day.
FAULTS = ("503", "drop", "cut", "short", "wrong_range")
PIECE = 128
SILENCE_S = {"stall": 2.0, "silent": 1000.0}


class Web:
    """`faults(number, path)` returns the fault of the answer to request `number`, or None."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: Callable[[int, str], str | None] = lambda number, path: None
        # Path and range of each.
        self.requests: list[tuple[str, str]] = []
        # The faults so far.
        self.done: Counter[str] = Counter()
        self.ended = threading.Event()
        self.url = ""

    def answer(self, path: str, asked: str, sent: Mapping[str, str]) -> tuple[int, dict, bytes]:
        """Status, headers and body without a fault; `sent` are the request's headers, in lower case."""
        file = self.folder / unquote(path).lstrip("/")
        if not file.is_file():
            return 404, {"Content-Length": "0"}, b""
        data = file.read_bytes()
        headers = {"ETag": f'"{file.stat().st_mtime_ns:x}-{len(data):x}"'}
        match = re.match(r"bytes=(\d+)-(\d+)$", asked)
        if not match:
            return 200, headers | {"Content-Length": str(len(data))}, data
        start = int(match[1])
        stop = min(int(match[2]) + 1, len(data))
        if start >= len(data):
            return 416, {"Content-Range": f"bytes */{len(data)}", "Content-Length": "0"}, b""
        headers |= {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}", "Content-Length": str(stop - start)}
        return 206, headers, data[start:stop]

    def fault(self, number: int, path: str, body: bytes) -> str | None:
        """What goes wrong with this answer, counted in `done`."""
        kind = self.faults(number, path)
        if kind in ("short", "drop") and len(body) < 2:
            return None  # would not be noticed
        if kind:
            self.done[kind] += 1
        return kind


def send(file: BinaryIO, body: bytes, piece: int | None) -> None:
    """Send the body at once, or in pieces."""
    for start in range(0, len(body), piece or len(body) or 1):
        file.write(body[start : start + (piece or len(body))])
        if piece:
            file.flush()
            time.sleep(0.01)


@contextmanager
def serving(web: Web) -> Iterator[Web]:
    """The server, on a free port of this machine."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = 1 << 20

        def do_GET(self) -> None:
            number = len(web.requests)
            asked = self.headers.get("Range", "")
            web.requests.append((self.path, asked))
            status, headers, body = web.answer(
                self.path, asked, {name.lower(): value for name, value in self.headers.items()}
            )
            fault = web.fault(number, self.path, body)
            match fault:
                case "503":
                    status = 503
                    headers = {"Content-Length": "0"}
                    body = b""
                case "429":
                    status = 429
                    headers = {"Content-Length": "0", "Retry-After": "86400"}
                    body = b""
                case "short":
                    body = body[: len(body) // 2]
                    headers["Content-Length"] = str(len(body))
                case "wrong_range" if "Content-Range" in headers:
                    headers["Content-Range"] = re.sub(r"bytes (\d+)", r"bytes 9\1", headers["Content-Range"])
                case "drop":
                    body = body[: len(body) // 2]
            web.ended.wait(SILENCE_S.get(fault or "", 0.0))
            self.close_connection = fault in ("drop", "cut", *SILENCE_S)
            if fault in ("cut", *SILENCE_S):
                return
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            send(self.wfile, body, {"slow": PIECE, "drip": 1}.get(fault or ""))

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
            web.ended.set()
            server.shutdown()
            thread.join()
