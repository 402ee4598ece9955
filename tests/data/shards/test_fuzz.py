"""Hostile shards: reading any bytes ends, in bounded memory, with reasons instead of exceptions.

It writes nothing, starts no program and contacts no other machine.
"""

import gzip
import os
import tarfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clipscale.data.picture import Picture
from clipscale.data.sample import IMAGE_TYPES, BrokenSampleError, image_bytes, size_limits_of
from clipscale.data.shards import index
from clipscale.data.shards.reader import ReadFailure, read_shard
from clipscale.data.shards.tar import BLOCK_BYTES
from tests.data.files import picture, write_tar
from tests.support.audit import heard

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# Bytes that Python and numpy may allocate for a shard of 30 KB.
BOUND = 64 << 20
REASONS = {"usable", "no_image", "empty_image", "huge_image", "unreadable_image"}
REASONS |= {"truncated_shard", "unreadable_shard", "repeated_member", "link", "outdated_index"}
HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def shard(folder: Path) -> bytes:
    path = folder / "whole.tar"
    if not path.exists():
        members = []
        for number, kind in enumerate(KINDS * 2):
            name = "jpg" if kind == "JPEG" else kind.lower()
            members += [(f"{number}.{name}", picture(number, (24, 17), kind)), (f"{number}.txt", b"a caption")]
            members += [(f"{number}.json", b'{"alt": "other", "n": [1, {"x": null}]}')]
        members.append(("x" * 130 + ".txt", b"a long name"))
        write_tar(path, members)
    return path.read_bytes()


def use(path: Path, offsets: Any = lambda *_: None) -> Counter[str]:
    """Read a shard and decode its pictures, and count the reasons."""
    problem = ReadFailure()
    reasons = Counter[str]()
    for sample in read_shard(
        str(path), problem, size_limits=size_limits_of(IMAGE_TYPES, ["txt", "json"]), offsets=offsets
    ):
        try:
            if sample.error:
                raise BrokenSampleError(sample.error)
            Picture.read(image_bytes(sample.members), 100_000).decode()
            reasons["usable"] += 1
        except BrokenSampleError as error:
            reasons[error.reason] += 1
    if problem.reason:
        reasons[problem.reason] += 1
    return reasons


@contextmanager
def effects() -> Iterator[list[str]]:
    """What this thread does meanwhile beside reading files: Python's audit events."""
    thread = threading.get_ident()
    seen = list[str]()

    def hear(event: str, given: tuple[Any, ...]) -> None:
        if thread != threading.get_ident():
            return
        writes = event == "open" and isinstance(given[2], int) and given[2] & WRITING
        acts = event.startswith(("os.", "shutil.", "subprocess.", "socket.", "tempfile.", "ctypes.dlopen", "pty."))
        if writes or (acts and event not in HARMLESS):
            seen.append(f"{event} {given}")

    with heard(hear):
        yield seen


def survives(data: bytes, folder: Path) -> None:
    """Read and index the bytes as a shard; fails if that takes long or much memory, or does anything but read."""
    path = folder / "work.tar"
    path.write_bytes(data)
    begun = time.process_time()
    tracemalloc.start()
    try:
        with effects() as seen:
            # with the index of another file, as if the change had not been noticed, too
            reasons = use(path) + use(path, lambda *_: np.arange(0, 40) * 3 * BLOCK_BYTES)
            entry = index.scan_shard(str(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert set(reasons) <= REASONS, reasons
    assert entry.samples <= len(data) // BLOCK_BYTES + 1
    assert peak < BOUND, f"{peak} bytes for {len(data)}"
    assert time.process_time() - begun < 20
    assert not seen, seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    shard(folder)
    reasons = use(folder / "whole.tar")  # lazy imports, which may write byte code, happen here
    assert reasons["usable"] == 2 * len(KINDS), reasons
    with effects() as seen:
        (folder / "x").write_bytes(b"")
        os.system("true")
    assert [line.split()[0] for line in seen] == ["open", "os.system"], "effects are heard"
    return folder


hits = st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8)), max_size=10)
FIELDS = {"name": (0, 100), "size": (124, 136), "kind": (156, 157)}
FIELDS |= {"link": (157, 257), "magic": (257, 265), "prefix": (345, 500)}


def damaged(data: bytes, where: list[tuple[float, bytes]], cut: float) -> bytes:
    out = bytearray(data)
    for at, new in where:
        start = int(at * (len(out) - len(new)))
        out[start : start + len(new)] = new
    return bytes(out[: int(len(out) * (1 - cut**3))])


def reheaded(data: bytes, edits: list[tuple[int, str, bytes]]) -> bytes:
    """The data with header fields replaced and the headers' checksums corrected."""
    out = bytearray(data)
    headers = [at for at in range(0, len(out), BLOCK_BYTES) if out[at + 257 : at + 262] == b"ustar"]
    for number, name, value in edits:
        at = headers[number % len(headers)]
        first, last = FIELDS[name]
        out[at + first : at + last] = value[: last - first].ljust(last - first, b"\0")
        out[at + 148 : at + 156] = b" " * 8
        out[at + 148 : at + 156] = b"%06o\0 " % sum(out[at : at + BLOCK_BYTES])
    return bytes(out)


LIES = [b"-1", b"7" * 11, b"\x80" + b"\xff" * 11, b"\xff" * 12, b"../../x.txt", b"/etc/x.png", b"L", b"x", b"g", b"K"]
values = st.binary(max_size=16) | st.sampled_from(LIES)
edits = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(sorted(FIELDS)), values), min_size=1, max_size=6)


def rounds(examples: int) -> settings:
    return settings(max_examples=examples, suppress_health_check=list(HealthCheck))


@rounds(40)
@given(hits, st.floats(0, 1))
def test_readers_survive_damaged_shards(folder: Path, where: list[tuple[float, bytes]], cut: float) -> None:
    survives(damaged(shard(folder), where, cut), folder)


@rounds(40)
@given(edits)
def test_readers_survive_false_headers(folder: Path, changes: list[tuple[int, str, bytes]]) -> None:
    survives(reheaded(shard(folder), changes), folder)


@pytest.mark.parametrize("kind", [b"x", b"L", b"K"])
def test_a_long_extended_header_is_refused(folder: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("a.txt")
    info.size = 300 << 20
    info.type = kind
    survives(gzip.compress(info.tobuf() + bytes(2 << 20)), folder)
