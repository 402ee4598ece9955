"""Hostile shards: whatever the bytes say, reading ends, in bounded memory, with reasons instead of exceptions, and writes nothing."""

import bz2
import gzip
import lzma
import os
import subprocess
import sys
import tarfile
import time
import tracemalloc
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clipscale.data import indexing
from clipscale.data.archive import ReadProblem, read_shard
from clipscale.data.config import FilterConfig
from clipscale.data.decode import IMAGE_TYPES, BrokenSampleError, TrainTransform, image_bytes
from clipscale.data.filters import selection
from clipscale.data.order import Draws
from clipscale.data.sample import limits
from clipscale.data.tar import BLOCK
from tests.data.files import Members, picture, write_tar

SELECTION = selection("txt", ["txt", "json:alt"], ["{}", "a {}"], FilterConfig(min_side=2, fields=["alt!=x"]))
TRANSFORM = TrainTransform(16, (0.5, 1.0), (0.75, 4 / 3), 0.5, 100_000)
KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
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


def use(path: Path, places: bool = False) -> Counter[str]:
    """Read a shard as training does; reasons and how often."""
    problem, found = ReadProblem(), Counter[str]()
    out = np.zeros((3, 16, 16), np.uint8)
    # an index of other bytes, as if it had not been noticed that they changed
    offsets = (lambda url, opened: np.arange(0, 40) * 3 * BLOCK) if places else None
    kinds = limits(IMAGE_TYPES, SELECTION.members())
    for sample in read_shard(str(path), problem, kinds=kinds, places=offsets):
        try:
            if sample.damage:
                raise BrokenSampleError(sample.damage)
            caption = SELECTION.caption(sample.members, Draws(1))
            SELECTION.check(sample, caption)
            TRANSFORM(image_bytes(sample.members), Draws(2), out)
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


def survives(data: bytes, folder: Path) -> None:
    """Use, index and reread the bytes as a shard; fail where that takes long or much memory, or leaves a file."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    path = work / "x.tar"
    path.write_bytes(data)
    begun = time.monotonic()
    tracemalloc.start()
    try:
        found = use(path) + use(path, places=True)
        entry = indexing.survey(str(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert set(found) <= REASONS, found
    assert entry.samples <= len(data) // BLOCK + 1
    assert peak < BOUND, f"{peak} bytes for {len(data)}"
    assert time.monotonic() - begun < 20
    assert os.listdir(work) == ["x.tar"]  # noqa: PTH208 (names only)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


hits = st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8)), max_size=10)
FIELDS = {
    "name": (0, 100),
    "size": (124, 136),
    "kind": (156, 157),
    "link": (157, 257),
    "magic": (257, 265),
    "prefix": (345, 500),
}


def damaged(data: bytes, where: list[tuple[float, bytes]], cut: float) -> bytes:
    out = bytearray(data)
    for at, new in where:
        start = int(at * (len(out) - len(new)))
        out[start : start + len(new)] = new
    return bytes(out[: int(len(out) * (1 - cut**3))])


def reheaded(data: bytes, edits: list[tuple[int, str, bytes]]) -> bytes:
    """With fields of headers replaced and their checksums made right again, so that they are believed."""
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
edits = st.lists(
    st.tuples(
        st.integers(0, 60), st.sampled_from(sorted(FIELDS)), st.one_of(st.binary(max_size=16), st.sampled_from(LIES))
    ),
    min_size=1,
    max_size=6,
)


def rounds(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


@rounds(40)
@given(hits, st.floats(0, 1))
def test_damaged_shards(folder: Path, where: list[tuple[float, bytes]], cut: float) -> None:
    survives(damaged(shard(folder), where, cut), folder)


@rounds(40)
@given(edits)
def test_lying_headers(folder: Path, changes: list[tuple[int, str, bytes]]) -> None:
    survives(reheaded(shard(folder), changes), folder)


@rounds(15)
@given(st.binary(max_size=4000))
def test_noise(folder: Path, data: bytes) -> None:
    survives(data, folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@rounds(3000)
@given(hits, st.floats(0, 1), edits)
def test_thousands_of_damaged_shards(
    folder: Path, where: list[tuple[float, bytes]], cut: float, changes: list[tuple[int, str, bytes]]
) -> None:
    survives(damaged(reheaded(shard(folder), changes), where, cut), folder)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_packed_bomb_is_read_in_bounded_memory(folder: Path, pack: object) -> None:
    """A member that training does not ask for is passed over, however large it unpacks."""
    info = tarfile.TarInfo("a.bin")
    info.size = 100 << 20
    survives(pack(info.tobuf() + bytes(info.size)), folder)  # type: ignore[operator]


CHILD = """
import re, sys
from pathlib import Path
from clipscale.data.lanes import segment_windows
from clipscale.data.order import Segment
from clipscale.data.sample import limits
from clipscale.data.store import Store
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])  # not a parent's, as ru_maxrss is
before = peak()
windows = segment_windows(Segment(0, 0, 0, None, None), sys.argv[1], 256, 0, limits(["jpg"]), Store())
sizes = [len(items) for items in windows if isinstance(items, list)]
print(sum(sizes), len(sizes), peak() - before)
"""


def test_a_bomb_of_wanted_members_is_read_in_bounded_memory(folder: Path) -> None:
    """24 pictures of 24 MiB in 0.6 MB: more than a window may hold. The peak of a process of its own is looked at."""
    path = folder / "wanted.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as out:
        for number in range(24):
            info = tarfile.TarInfo(f"{number}.jpg")
            info.size = 24 << 20
            out.write(info.tobuf() + bytes(info.size))
    out = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    samples, windows, grown = map(int, out.stdout.split())
    print(f"{samples} samples in {windows} windows, {grown / 1024:.0f} MiB more than before")
    assert samples == 24 and windows > 2
    assert grown < 400 << 10, f"{grown} KiB more: two windows and a sample at most"


@pytest.mark.parametrize("kind", [b"x", b"L", b"K"])
def test_a_long_extended_header_is_refused(folder: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("a.txt")
    info.size, info.type = 300 << 20, kind
    survives(gzip.compress(info.tobuf() + bytes(2 << 20)), folder)


@pytest.mark.parametrize("side", [20_000, 60_000])
def test_a_bomb_of_pixels_is_refused_before_it_is_decoded(folder: Path, side: int) -> None:
    header = side.to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00"
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1 << 16))), (b"IEND", b"")]
    body = b"".join(len(d).to_bytes(4, "big") + n + d + zlib.crc32(n + d).to_bytes(4, "big") for n, d in chunks)
    path = write_tar(folder / "bomb.tar", [("a.png", b"\x89PNG\r\n\x1a\n" + body), ("a.txt", b"x"), ("a.json", b"{}")])
    tracemalloc.start()
    begun = time.monotonic()
    found = use(path)
    seconds, peak = time.monotonic() - begun, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert set(found) <= {"huge_image", "filter_no_alt"} and peak < 4 << 20 and seconds < 1, (found, peak, seconds)


def test_deep_json_is_a_broken_sample(folder: Path) -> None:
    deep = b'{"alt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    path = write_tar(folder / "deep.tar", [("a.png", picture()), ("a.json", deep), ("a.txt", b"x")])
    assert set(use(path)) <= {"bad_json", "filter_no_alt", "usable"}
