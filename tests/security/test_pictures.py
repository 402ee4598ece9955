"""No picture takes more memory or time than its pixels allow, whatever its shape, depth and scans."""

import io
import multiprocessing
import resource
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from clipscale.data import eval_transform
from clipscale.data.decode import Picture, TrainTransform
from clipscale.data.eval_transform import EvalTransform
from clipscale.data.features import StoredFeatures, encoded_row
from clipscale.data.order import CounterRNG
from clipscale.data.sample import BrokenSampleError, RawSample
from clipscale.embed.encode import GROUP_BYTES, groups
from tests.data.files import picture

SIDE = 32


def png(width: int, height: int, depth: int = 8, colour: int = 0) -> bytes:
    """A PNG of one value, which takes a thousandth of its pixels' bytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    row = b"\0" + b"\x40" * -(-width * depth * {0: 1, 2: 3, 6: 4}[colour] // 8)
    packer = zlib.compressobj(9)
    data = b"".join([*(packer.compress(row) for _ in range(height)), packer.flush()])
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def train(data: bytes) -> None:
    transform = TrainTransform(SIDE, (0.9, 1.0), (0.75, 4 / 3), 0.5, 89_478_485)
    transform(data, CounterRNG(1), np.empty((3, SIDE, SIDE), np.uint8))


def _limited(work: Callable[..., Any], value: Any, extra: int, results: Any) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, used + extra))
    started = time.monotonic()
    try:
        work(value)
        results.put(("done", time.monotonic() - started))
    except BrokenSampleError as error:
        refused = isinstance(error.__cause__, MemoryError)  # it was asked for, and the limit is the test's
        results.put(("too much memory" if refused else error.reason, time.monotonic() - started))
    except BaseException as error:
        results.put((repr(error), time.monotonic() - started))


def limited(work: Callable[..., Any], value: Any, extra: int = 1 << 30) -> tuple[str, float]:
    """What `work` comes to in a process with so many more bytes of address space, and its seconds."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=_limited, args=(work, value, extra, results))
    process.start()
    found = results.get(timeout=120)
    process.join()
    return found  # type: ignore[no-any-return]


# -- aspect -----------------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(
    short=st.integers(1, 3),
    long=st.integers(1, 200) | st.integers(20_000, 80_000),
    upright=st.booleans(),
    colour=st.sampled_from([0, 2, 6]),
    mode=st.sampled_from(("shortest", "squash", "longest")),
)
def test_no_aspect_takes_memory(short: int, long: int, upright: bool, colour: int, mode: str) -> None:
    data = png(*((short, long) if upright else (long, short)), colour=colour)
    for work in (EvalTransform(224, mode=mode), train):
        outcome, seconds = limited(work, data, 256 << 20)
        assert outcome in ("done", "unreadable_image") and seconds < 10, (
            f"{len(data)} bytes: {outcome}, {seconds:.1f} s"
        )


@pytest.mark.parametrize(("width", "height"), [(3, 400), (700, 5), (1, 1000), (3000, 7)])
def test_what_is_resized_alone_are_the_pixels_of_the_whole(
    width: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = picture(1, (width, height))
    part = EvalTransform(SIDE)(data)
    monkeypatch.setattr(eval_transform, "LONGEST", 10**6)
    whole = EvalTransform(SIDE)(data)
    worst = np.abs(part.astype(int) - whole).max()
    assert worst <= 2, f"differs by {worst}/255"


# -- depth ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [16, 8])
def test_deep_pictures_take_little_more_than_their_pixels(depth: int) -> None:
    data = png(4000, 4000, depth)  # 16 million pixels: 32 MB as read, 48 MB as RGB
    outcome, _ = limited(train, data, 320 << 20)
    assert outcome == "done", outcome


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_deep_pictures_keep_their_values(mode: str) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (200, 30))
    kind = {"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]
    out = io.BytesIO()
    Image.fromarray(values.astype(kind)).save(out, "TIFF")
    expected = (values / (1 if mode == "F" else 257)).clip(0, 255).round().astype(np.uint8)
    assert np.array_equal(Picture(out.getvalue(), 10**6).decode()[:, :, 0], expected)


# -- scans ------------------------------------------------------------------------------------------------------------


def scans(count: int, size: int) -> bytes:
    data = picture(2, (size, size), "JPEG", progressive=True)
    last = data[data.rfind(b"\xff\xda") : -2]
    return data[:-2] + last * (count - data.count(b"\xff\xda")) + b"\xff\xd9"


def test_a_jpeg_of_many_scans_is_refused_by_its_work() -> None:
    for work in (EvalTransform(SIDE), train):
        work(scans(10, 64))
        for bomb in (scans(2000, 64), scans(101, 2000)):
            started = time.monotonic()
            with pytest.raises(BrokenSampleError, match=r"huge_image: \d+ x \d+ pixels in \d+ scans"):
                work(bomb)
            assert time.monotonic() - started < 1


# -- features ---------------------------------------------------------------------------------------------------------


def npy_of(header: str) -> bytes:
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


HEADERS = [
    "{'descr': '<f2', 'fortran_order': False, 'shape': (1000000000000,), }\n",
    "{'descr': '<f2', 'fortran_order': False, 'shape': (4,), }\n",
    "{'descr': '|O', 'fortran_order': False, 'shape': (4,), }\n",
    "{'descr': '<f2', 'fortran_order': False, 'shape': " + "(" * 9000,
    "{'descr': 'V" + "9" * 4000 + "', 'fortran_order': False, 'shape': (4,), }\n",
]


@settings(max_examples=200)
@given(
    data=st.sampled_from([npy_of(header) for header in HEADERS] + [b"PK\x03\x04", b""])
    | st.binary(max_size=80)
    | st.text("{'descr:<f24,ortan_oshpe()90 }", max_size=60).map(npy_of)
)
def test_no_npy_member_is_believed(data: bytes) -> None:
    out = np.zeros(4, np.float16)
    with pytest.raises(BrokenSampleError, match="bad_features"):
        StoredFeatures("npy", 4, "float16")(data, CounterRNG(0), out)
    assert not out.any()


def test_an_npy_that_claims_terabytes_takes_no_memory() -> None:
    read = StoredFeatures("npy", 4, "float16")
    out = np.zeros(4, np.float16)
    read(encoded_row(np.arange(4, dtype=np.float16)), CounterRNG(0), out)
    assert out.tolist() == [0, 1, 2, 3]
    outcome, _ = limited(lambda data: read(data, CounterRNG(0), out), npy_of(HEADERS[0]) + bytes(100), 64 << 20)
    assert outcome == "bad_features"


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(0, GROUP_BYTES), max_size=30), most=st.integers(1, 8))
def test_whole_samples_wait_in_groups_of_bounded_bytes(sizes: list[int], most: int) -> None:
    class Claimed(bytes):
        def __len__(self) -> int:
            return self.size  # type: ignore[attr-defined, no-any-return]

    raws = []
    for number, size in enumerate(sizes):
        content = Claimed()
        content.size = size  # type: ignore[attr-defined]
        raws.append(RawSample("", str(number), number, {"png": content}))
    found = list(groups(iter(raws), most))
    assert [raw.index for group in found for raw in group] == list(range(len(sizes)))
    for group in found:
        assert len(group) <= most and sum(sizes[raw.index] for raw in group[:-1]) < GROUP_BYTES
