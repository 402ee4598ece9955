"""What prefetching gains: samples/s of one loader from a distant web server, with and without, measured alternately.

    python -m tests.data.shards.far [samples=4096 latencies=0.05,0.2 bandwidth=40 shard_streams=4 times=3]

The server is a process of its own on this machine; every request waits `latency` seconds, every answer comes with `bandwidth` MB/s.
"""

import http.server
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

SHARDS, SIDE, BATCH = 8, 256, 256


class Far(http.server.BaseHTTPRequestHandler):
    """Serves ranges of files, with a delay and at a limited rate."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder, latency, bandwidth = Path(), 0.0, 0.0

    def do_GET(self) -> None:
        begun = time.monotonic() + self.latency
        path = self.folder / self.path.lstrip("/")
        match = re.match(r"bytes=(\d+)-(\d+)$", self.headers["Range"])
        assert match
        size = path.stat().st_size
        start, stop = int(match[1]), min(int(match[2]) + 1, size)
        with path.open("rb") as file:
            file.seek(start)
            data = memoryview(file.read(stop - start))
        self.send_response(206)
        headers = {"ETag": '"1"', "Content-Length": stop - start, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
        for name, value in headers.items():
            self.send_header(name, str(value))
        time.sleep(max(0.0, begun - time.monotonic()))
        self.end_headers()
        for at in range(0, len(data), 1 << 18):
            self.wfile.write(data[at : at + (1 << 18)])
            time.sleep(max(0.0, begun + at / self.bandwidth - time.monotonic()))

    def log_message(self, *_: object) -> None:
        pass


def serve(folder: str, latency: str, bandwidth: str) -> None:
    """Print the port, then serve until the process ends."""
    Far.folder, Far.latency, Far.bandwidth = Path(folder), float(latency), float(bandwidth)
    http.server.ThreadingHTTPServer.handle_error = lambda *_: None  # type: ignore[method-assign] (clients that cancel)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Far) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


def write(folder: Path, samples: int) -> None:
    """Write shards of pictures with the spectrum of photographs, and their counts."""
    import json

    from tests.data.files import photograph, write_tar

    pictures = [photograph(SIDE, seed) for seed in range(64)]
    each = samples // SHARDS
    for number in range(SHARDS):
        members = []
        for i in range(each):
            members += [(f"{number}-{i}.jpg", pictures[i % 64]), (f"{number}-{i}.txt", f"caption {i}".encode())]
        write_tar(folder / f"{number}.tar", members)
    (folder / "sizes.json").write_text(json.dumps({f"{number}.tar": each for number in range(SHARDS)}))


def rate(source: str, samples: int, streams: int, cache: str) -> float:
    """Samples a second of one loader over an epoch, without the first batch."""
    from tests.data.streams import open_stream

    stream = open_stream(source, batch=BATCH, side=224, shard_streams=streams, shuffle=256, cache=cache, cache_bytes=0)
    stream.next_batch().ids()
    begun = time.perf_counter()
    steps = samples // BATCH - 1
    for _ in range(steps):
        stream.next_batch().ids()
    took = time.perf_counter() - begun
    assert not stream.broken, stream.broken
    stream.close()
    return steps * BATCH / took


def main(words: list[str]) -> None:
    """Measure and print."""
    from clipscale.data.shards import remote, scan

    given = dict(word.split("=") for word in words)
    samples, streams, times = (
        int(given.get(name, usual)) for name, usual in (("samples", 4096), ("shard_streams", 4), ("times", 3))
    )
    bandwidth = float(given.get("bandwidth", 40)) * 1e6
    bounds = {"without": 0, "with": getattr(remote, "PREFETCH_BYTES", 0)}
    with tempfile.TemporaryDirectory() as home:
        folder, cache = Path(home) / "set", str(Path(home) / "cache")
        folder.mkdir()
        write(folder, samples)
        near = rate(str(folder), samples, streams, cache)
        size = sum(p.stat().st_size for p in folder.iterdir()) / samples / 1e3
        print(f"{samples} samples of {size:.0f} kB, {streams} shard streams")
        print(f"local files: {near:.0f} samples/s")
        for latency in map(float, given.get("latencies", "0.05,0.2").split(",")):
            command = [
                sys.executable,
                "-m",
                "tests.data.shards.far",
                "serve",
                str(folder),
                str(latency),
                str(bandwidth),
            ]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout
                place = f"http://127.0.0.1:{server.stdout.readline().strip()}"
                urls = [f"{place}/{number}.tar" for number in range(SHARDS)]
                scan.update_indexes(urls, cache=cache)
                rates: dict[str, list[float]] = {name: [] for name in bounds}
                for _ in range(times):
                    for name, bound in bounds.items():
                        remote.PREFETCH_BYTES = bound
                        rates[name].append(rate(f"{place}/{{0..{SHARDS - 1}}}.tar", samples, streams, cache))
                server.terminate()
            line = ", ".join(
                f"{name} {median(found):.0f} ({min(found):.0f} to {max(found):.0f})" for name, found in rates.items()
            )
            print(f"{latency * 1e3:.0f} ms, {bandwidth / 1e6:.0f} MB/s: {line} samples/s", flush=True)


if __name__ == "__main__":
    os.environ["NO_PROXY"] = "127.0.0.1"
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    else:
        main(sys.argv[1:])
