"""Hours of loading in fast-forward: tiny pictures, many batches, and a check of every process's memory.

CLIPSCALE_SOAK_SAMPLES=1200000 makes it an hour of 333 pictures a second.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.data.files import write_shards
from tests.data.streams import open_stream, processes_of

SAMPLES = int(os.environ.get("CLIPSCALE_SOAK_SAMPLES", "60000"))
BATCH, CHUNK = 256, 64
ALLOWED = 4 * 2**20


def processes(stream: Any) -> Iterator[tuple[str, psutil.Process]]:
    yield "trainer", psutil.Process()
    for worker in processes_of(stream):
        yield worker.name, psutil.Process(worker.pid)


def held(process: psutil.Process) -> int:
    """Bytes of its own and of shared memory. Files' pages are left out: what they count for depends on who else has them mapped."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


@pytest.mark.slow
@pytest.mark.timeout(900 + SAMPLES / 100)
@pytest.mark.parametrize("backend", ["host", "disk", "encoded"])
@pytest.mark.parametrize("order", ["epochs", "resampled"])
def test_no_process_grows(tmp_path: Path, backend: str, order: str) -> None:
    write_shards(tmp_path / "set", [700, 500, 901, 333])
    options = {"backend": backend, "chunk": CHUNK, "folder": str(tmp_path), "workers": 2, "order": order}
    samples = SAMPLES // (1 if backend == "host" else 2)
    with open_stream(tmp_path / "set", batch=BATCH, side=24, **options) as stream:
        seen: dict[str, list[int]] = {}
        files: dict[str, list[int]] = {}
        steps = samples // BATCH
        for step in range(steps):
            batch = stream.next_batch()
            for _ in range(2):
                for start in range(0, BATCH, CHUNK):
                    batch.pixels(start, start + CHUNK)
            if step >= steps // 5 and step % max(5, steps // 200) == 0:
                for name, process in processes(stream):
                    seen.setdefault(name, []).append(held(process))
                    files.setdefault(name, []).append(process.num_fds())
    for name, sizes in seen.items():
        half = len(sizes) // 2
        # the least of each half: what is in use, whatever the allocator holds back between collections
        grown = min(sizes[half:]) - min(sizes[:half])
        line = (
            f"{name} {sizes[0] / 2**20:.1f} MiB, {grown / 2**20:+.2f} MiB in the second half; {files[name][-1]} files"
        )
        print(f"{backend}, {order}, {samples} samples: {line}")
        assert grown < ALLOWED, f"{name}: {grown / 2**20:.1f} MiB more in the second half of {samples} samples"
        assert max(files[name]) < files[name][0] + 10, f"{name}: open files {files[name]}"
