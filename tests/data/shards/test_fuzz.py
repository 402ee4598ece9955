"""Hostile shards: reading any bytes ends, in bounded memory, with reasons instead of exceptions.

It writes nothing, starts no program and contacts no other machine.
"""

import gzip
import io
import lzma
import os
import socket
import subprocess
import tarfile
import threading
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clipscale.config.data import FilterConfig
from clipscale.data.decode import IMAGE_TYPES, TrainTransform, image_bytes
from clipscale.data.filters import selection
from clipscale.data.order import CounterRNG
from clipscale.data.sample import BrokenSampleError, limits
from clipscale.data.shards import scan
from clipscale.data.shards.listing import expand
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.tar import BLOCK, LARGEST_HEADER, next_member
from tests.data.files import Members, picture, write_tar
from tests.data.streams import read_in_windows
from tests.support.audit import heard
from tests.support.forks import forks

SELECTION = selection("txt", ["txt", "json:alt"], ["{}", "a {}"], FilterConfig(min_side=2, fields=["alt!=x"]))
TRANSFORM = TrainTransform(16, (0.5, 1.0), (0.75, 4 / 3), 0.5, 100_000)
KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
BOUND = 64 << 20
"""Bytes that Python and numpy may allocate for a shard of 30 KB."""


def shard(folder: Path) -> bytes:
    path = folder / "whole.tar"
    if not path.exists():
        members: Members = []
        for number, kind in enumerate(KINDS * 2):
            name = "jpg" if kind == "JPEG" else kind.lower()
            members += [(f"{number}.{name}", picture(number, (24, 17), kind)), (f"{number}.txt", b"a caption")]
            members += [(f"{number}.json", b'{"alt": "other", "n": [1, {"x": null}]}')]
        members.append(("x" * 130 + ".txt", b"a long name"))
        write_tar(path, members)
    return path.read_bytes()


def use(path: Path, indexed: bool = False) -> Counter[str]:
    """Read a shard as training does, and count the reasons."""
    problem, found = ReadProblem(), Counter[str]()
    out = np.zeros((3, 16, 16), np.uint8)
    # the index of another file, as if the change had not been noticed
    offsets = (lambda url, opened: np.arange(0, 40) * 3 * BLOCK) if indexed else None
    kinds = limits(IMAGE_TYPES, SELECTION.members())
    for sample in read_shard(str(path), problem, kinds=kinds, offsets=offsets):
        try:
            if sample.damage:
                raise BrokenSampleError(sample.damage)
            caption = SELECTION.caption(sample.members, CounterRNG(1))
            SELECTION.check(sample, caption)
            TRANSFORM(image_bytes(sample.members), CounterRNG(2), out)
            found["usable"] += 1
        except BrokenSampleError as error:
            found[error.reason] += 1
    if problem.reason:
        found[problem.reason] += 1
    return found


REASONS = {
    "usable", "no_image", "empty_image", "huge_image", "unreadable_image", "no_caption", "empty_caption", "caption_not_utf8", "bad_json",
    "filter_min_side", "filter_alt", "filter_no_alt", "truncated_shard", "unreadable_shard", "damaged_sample",
}  # fmt: skip


class Audit:
    """Records this thread's effects."""

    HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr")
    WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.seen: list[str] = []

    def hear(self, event: str, given: tuple[Any, ...]) -> None:
        if self.thread != threading.get_ident():
            return
        writes = event == "open" and isinstance(given[2], int) and given[2] & self.WRITING
        acts = event.startswith(("os.", "shutil.", "subprocess.", "socket.", "tempfile.", "ctypes.dlopen", "pty."))
        if writes or (acts and event not in self.HARMLESS):
            self.seen.append(f"{event} {given}")

    @contextmanager
    def on(self) -> Iterator[list[str]]:
        """Record meanwhile; yields the list of events."""
        self.seen = []
        with heard(self.hear):
            yield self.seen


@pytest.fixture(scope="module")
def audit() -> Audit:
    return Audit()


def test_the_audit_records_every_effect(audit: Audit, tmp_path: Path) -> None:
    here = tmp_path / "here"
    with socket.socket() as closed, audit.on() as seen:
        here.write_bytes(b"")
        os.close(os.open(here, os.O_RDWR))
        here.rename(tmp_path / "there")
        (tmp_path / "folder").mkdir()
        (tmp_path / "there").unlink()
        (tmp_path / "link").symlink_to("/etc/passwd")
        subprocess.run(["true"], check=True)
        os.system("true")
        closed.connect_ex(("127.0.0.1", 1))
    events = [line.split()[0] for line in seen]
    acts = ["open", "open", "os.rename", "os.mkdir", "os.remove", "os.symlink", "subprocess.Popen", "os.system"]
    assert [event for event in events if event in acts] == acts and "socket.connect" in events, seen


def survives(data: bytes, folder: Path, audit: Audit) -> None:
    """Read and index the bytes as a shard; fails if that takes long or much memory, or does anything but read."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    path = work / "x.tar"
    path.write_bytes(data)
    begun = time.monotonic()
    tracemalloc.start()
    try:
        with audit.on() as seen:
            found = use(path) + use(path, indexed=True)
            entry = scan.scan_shard(str(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert set(found) <= REASONS, found
    assert entry.samples <= len(data) // BLOCK + 1
    assert peak < BOUND, f"{peak} bytes for {len(data)}"
    assert time.monotonic() - begun < 20
    assert os.listdir(work) == ["x.tar"]  # noqa: PTH208 (names only)
    assert not seen, seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    shard(folder)
    found = use(folder / "whole.tar")  # lazy imports, which may write byte code, happen here
    assert found["usable"] == 2 * len(KINDS), found
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
    headers = [at for at in range(0, len(out), BLOCK) if out[at + 257 : at + 262] == b"ustar"]
    for number, name, value in edits:
        at = headers[number % len(headers)]
        first, last = FIELDS[name]
        out[at + first : at + last] = value[: last - first].ljust(last - first, b"\0")
        out[at + 148 : at + 156] = b" " * 8
        out[at + 148 : at + 156] = b"%06o\0 " % sum(out[at : at + BLOCK])
    return bytes(out)


LIES = [b"-1", b"7" * 11, b"\x80" + b"\xff" * 11, b"\xff" * 12, b"../../x.txt", b"/etc/x.png", b"L", b"x", b"g", b"K"]
values = st.binary(max_size=16) | st.sampled_from(LIES)
edits = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(sorted(FIELDS)), values), min_size=1, max_size=6)


def rounds(examples: int) -> settings:
    return settings(max_examples=examples, suppress_health_check=list(HealthCheck))


@rounds(40)
@given(hits, st.floats(0, 1))
def test_damaged_shards(folder: Path, audit: Audit, where: list[tuple[float, bytes]], cut: float) -> None:
    survives(damaged(shard(folder), where, cut), folder, audit)


@rounds(40)
@given(edits)
def test_lying_headers(folder: Path, audit: Audit, changes: list[tuple[int, str, bytes]]) -> None:
    survives(reheaded(shard(folder), changes), folder, audit)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@rounds(3000)
@given(hits, st.floats(0, 1), edits)
def test_thousands_of_damaged_shards(
    folder: Path, audit: Audit, where: list[tuple[float, bytes]], cut: float, changes: list[tuple[int, str, bytes]]
) -> None:
    survives(damaged(reheaded(shard(folder), changes), where, cut), folder, audit)


def test_a_bomb_of_wanted_members_is_read_in_bounded_memory(folder: Path) -> None:
    """20 pictures of 24 MiB in half a megabyte are more than a window holds. A process of its own measures its peak."""
    path = folder / "wanted.tar.gz"
    zeros = gzip.compress(bytes(24 << 20), 1)
    with path.open("wb") as out:
        for number in range(20):
            info = tarfile.TarInfo(f"{number}.jpg")
            info.size = 24 << 20
            out.write(gzip.compress(info.tobuf()) + zeros)
    with forks().Pool(1) as pool:
        samples, grown = pool.apply(read_in_windows, (str(path), limits(["jpg"])))
    print(f"{samples} samples, {grown / 1024:.0f} MiB more than before")
    assert samples == 20
    assert grown < 400 << 10, f"{grown} KiB more: two windows and a sample at most"


@pytest.mark.parametrize("kind", [b"x", b"L", b"K"])
def test_a_long_extended_header_is_refused(folder: Path, audit: Audit, kind: bytes) -> None:
    info = tarfile.TarInfo("a.txt")
    info.size, info.type = 300 << 20, kind
    survives(gzip.compress(info.tobuf() + bytes(2 << 20)), folder, audit)


def test_an_xz_stream_with_a_large_dictionary_is_refused(folder: Path) -> None:
    """A dictionary of 1.5 GiB is refused; one of 64 MiB, from `xz -9`, is not."""
    path = folder / "dictionary.tar.xz"
    whole = lzma.compress(shard(folder), preset=9)
    at = 12  # the block's header behind the stream's: begins with its size in words, ends with its checksum
    size = 4 * (whole[at] + 1)
    header = bytearray(whole[at : at + size - 4])
    assert header[2:4] == b"\x21\x01", "the filter LZMA2, with one byte of properties: the dictionary's size"
    found = []
    for dictionary in (header[4], 37):
        header[4] = dictionary
        path.write_bytes(whole[:at] + header + zlib.crc32(header).to_bytes(4, "little") + whole[at + size :])
        problem = ReadProblem()
        found.append((len(list(read_shard(str(path), problem))), problem.reason))
    assert found == [(2 * len(KINDS) + 1, None), (0, "unreadable_shard")] and "emory" in problem.detail, problem


def test_a_long_extended_header_of_many_records_is_read_in_linear_time() -> None:
    """A quarter of a million records in a megabyte. Copying the rest for each takes 64 times as long as for an eighth."""

    def seconds(size: int) -> float:
        info = tarfile.TarInfo("x")
        info.type, info.size = tarfile.XHDTYPE, size
        stream = io.BytesIO(info.tobuf() + b"4 =\n" * (size // 4) + tarfile.TarInfo("a.txt").tobuf())
        begun = time.process_time()
        assert next_member(stream) == ("a.txt", 0)
        return time.process_time() - begun

    eighth, whole = (min(seconds(size) for _ in range(3)) for size in (LARGEST_HEADER // 8, LARGEST_HEADER))
    assert whole < 20 * eighth, (eighth, whole)


def test_a_table_that_unpacks_to_much_is_read_in_bounded_memory(folder: Path) -> None:
    """Twelve pictures of 24 MiB in a few kilobytes of Parquet are read one by one; a larger value is refused unread."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def column(values: list[Any], kind: Any, rows: list[int]) -> Any:
        return pyarrow.DictionaryArray.from_arrays(pyarrow.array(rows, pyarrow.int32()), pyarrow.array(values, kind))

    path = folder / "bomb.parquet"
    with parquet.ParquetWriter(
        path, pyarrow.schema({"jpg": pyarrow.dictionary(pyarrow.int32(), pyarrow.binary()), "txt": pyarrow.string()}),
        compression="zstd", store_schema=False,
    ) as out:  # fmt: skip
        for size, rows in ((24 << 20, 12), (72 << 20, 1)):
            pictures = column([bytes(size)], pyarrow.binary(), [0] * rows)
            out.write_table(pyarrow.table({"jpg": pictures, "txt": ["a caption"] * rows}, schema=out.schema))
    assert path.stat().st_size < 100_000
    pool = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool())
    before = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(pool)
    try:
        found: Counter[str | None] = Counter()
        for url in expand(str(path)):
            problem = ReadProblem()
            for raw in read_shard(url, problem, kinds=limits(["jpg"], ["txt"])):
                found[raw.damage] += 1
            found[problem.reason] += 1
    finally:
        pyarrow.set_memory_pool(before)
    print(f"{pool.max_memory() / 2**20:.0f} MiB at most")
    assert found == {"": 12, None: 1, "unreadable_shard": 1}, "twelve pictures, a shard without a problem, and one with"
    assert pool.max_memory() < 220 << 20, pool.max_memory()
