"""No sample that is accepted takes more than MOST_S seconds of one core; what would take more is counted and skipped."""

import io
import struct
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from clipscale.config.data import FilterConfig
from clipscale.config.sections import ModelConfig
from clipscale.data import picture_bounds
from clipscale.data.decode import caption_of
from clipscale.data.eval_transform import EvalTransform
from clipscale.data.features import StoredFeatures
from clipscale.data.filters import selection
from clipscale.data.loader.shard_stream import last_place
from clipscale.data.order import CounterRNG
from clipscale.data.picture_bounds import MOST_SCANNED, MOST_SCANS
from clipscale.data.sample import MAX_TEXT_BYTES, BrokenSampleError, RawSample
from clipscale.models.towers import architecture, tokenizer
from tests.data.files import picture
from tests.security.test_pictures import png, scans, train

MOST_S = 30.0
"""docs/security.md states it."""
MOST_PIXELS = 89_478_485
SIDE = 1400


def seconds(work: Callable[[], object]) -> float:
    """Time of this process's processors."""
    started = time.process_time()
    work()
    return time.process_time() - started


def noise(format: str, mode: str = "RGB", **options: object) -> bytes:
    values = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    out = io.BytesIO()
    image = Image.fromarray(values) if mode != "I;16" else Image.fromarray(values.astype(np.uint16)[..., 0] * 257)
    (image if mode == "I;16" else image.convert(mode)).save(out, format, **options)
    return out.getvalue()


# -- pictures in many parts --------------------------------------------------------------------------------------------


def chunks(count: int) -> bytes:
    """A PNG with so many empty texts."""
    whole = picture(0, (8, 8), "PNG")
    empty = struct.pack(">I", 0) + b"tEXt" + struct.pack(">I", zlib.crc32(b"tEXt"))
    return whole[:33] + empty * count + whole[33:]


def pixels_in_chunks(count: int) -> bytes:
    """A PNG whose pixels are in chunks of one byte, with empty ones between."""
    whole = png(64, 64)
    start = whole.index(b"IDAT") - 4
    (size,) = struct.unpack_from(">I", whole, start)
    empty = struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    bodies = [b"IDAT" + whole[start + 8 + i : start + 9 + i] for i in range(size)]
    parts = [struct.pack(">I", 1) + body + struct.pack(">I", zlib.crc32(body)) for body in bodies]
    return whole[:start] + parts[0] + empty * count + b"".join(parts[1:]) + whole[start + 12 + size :]


def padded(count: int) -> bytes:
    whole = picture(0, (16, 16), "JPEG")
    return whole[:2] + b"\xff" * count + whole[2:]


def segments(count: int) -> bytes:
    whole = picture(0, (16, 16), "JPEG")
    return whole[:2] + b"\xff\xfe\x00\x02" * count + whole[2:]


def runs(count: int) -> bytes:
    """A BMP in runs of one pixel, which Pillow reads in Python."""
    side = 4096
    head = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, 2 * count, 0, 0, 256, 0)
    start = 14 + len(head) + 1024
    return b"BM" + struct.pack("<IHHI", start + 2 * count, 0, 0, start) + head + bytes(1024) + b"\1\7" * count


def strips(count: int) -> bytes:
    """A TIFF of one row to a strip."""
    tags = [(256, 4, 1, 1), (257, 4, 1, count), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, count, 200)]
    tags += [(277, 3, 1, 1), (278, 4, 1, 1), (279, 4, count, 200 + 4 * count)]
    body = b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return (body + bytes(4)).ljust(200, b"\0") + struct.pack("<I", 8) * count + struct.pack("<I", 1) * count


def repeated(count: int, side: int) -> bytes:
    """A JPEG that is not progressive, whose scans come again and again."""
    whole = picture(2, (side, side), "JPEG")
    start = whole.index(b"\xff\xda")
    one = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + whole[start + 14 : -2]
    return whole[:start] + one * count + b"\xff\xd9"


MANY: dict[str, Callable[[int], bytes]] = {
    "texts of a PNG": lambda most: chunks(most // 2),
    "pixels of a PNG": lambda most: pixels_in_chunks(most // 2),
    "padding of a JPEG": padded,
    "segments of a JPEG": segments,
    "runs of a BMP": runs,
    "strips of a TIFF": lambda most: strips(picture_bounds.MOST_STRIPS + 1),
    "scans of a JPEG": lambda most: repeated(MOST_SCANS + 1, 64),
}


@pytest.mark.parametrize("name", MANY)
def test_a_picture_in_many_parts_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is smaller here, for the test's time."""
    monkeypatch.setattr(picture_bounds, "MOST_READS", 1 << 12)
    data = MANY[name](1 << 12)
    for work in (train, EvalTransform(32)):
        with pytest.raises(BrokenSampleError, match="huge_image"):
            work(data)


def test_a_tiff_of_many_strips_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow makes an object of each strip when it opens the file, before it reads one."""
    monkeypatch.setattr(picture_bounds, "MOST_STRIPS", 100)
    train(strips(100))
    for work in (train, EvalTransform(32)):
        with pytest.raises(BrokenSampleError, match="huge_image: 101 strips"):
            work(strips(101))


def test_ordinary_pictures_have_few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_bounds, "MOST_READS", 1 << 12)
    for format, options in (
        ("PNG", {}),
        ("JPEG", {"progressive": True}),
        ("WEBP", {}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {}),
    ):
        data = picture(1, (300, 200), format, **options)
        train(data)
        EvalTransform(32)(data)
    train(strips(1000))


# -- the worst that is accepted ----------------------------------------------------------------------------------------

PICTURES: dict[str, Callable[[], bytes]] = {
    "JPEG": lambda: noise("JPEG", quality=95),
    "JPEG in CMYK": lambda: noise("JPEG", "CMYK", quality=95),
    "PNG": lambda: noise("PNG", compress_level=1),
    "PNG of 16 bits": lambda: noise("PNG", "I;16", compress_level=1),
    "PNG with transparency": lambda: noise("PNG", "RGBA", compress_level=1),
    "WebP": lambda: noise("WEBP", quality=90, method=0),
    "WebP without loss": lambda: noise("WEBP", lossless=True, method=0, quality=0),
    "GIF": lambda: noise("GIF", "L"),
    "BMP": lambda: noise("BMP"),
    "TIFF": lambda: noise("TIFF"),
    "TIFF in LZW": lambda: noise("TIFF", compression="tiff_lzw"),
    "TIFF in JPEG": lambda: noise("TIFF", compression="jpeg"),
    "AVIF": lambda: noise("AVIF", speed=10, quality=90),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_the_largest_picture_takes_a_bounded_time(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Noise is the worst for a decoder. Its time is measured at 2 million pixels, and grows with them."""
    if name == "AVIF" and not features.check("avif"):
        pytest.skip("Pillow has no AVIF here")
    data = PICTURES[name]()
    taken = max(seconds(lambda: train(data)), seconds(lambda: EvalTransform(224)(data))) * MOST_PIXELS / SIDE**2
    with capsys.disabled():
        print(f"\n{name}: {taken:.1f} s at most")
    assert taken < MOST_S


@pytest.mark.slow
def test_a_jpeg_in_as_many_scans_as_allowed_takes_a_bounded_time(capsys: pytest.CaptureFixture[str]) -> None:
    data = scans(MOST_SCANS, SIDE)
    taken = seconds(lambda: train(data)) * MOST_SCANNED / (MOST_SCANS * SIDE**2)
    with capsys.disabled():
        print(f"\nscans: {taken:.1f} s at most")
    assert taken < MOST_S


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MANY if name != "scans of a JPEG"])
def test_a_picture_in_as_many_parts_as_allowed_takes_a_bounded_time(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = MANY[name](picture_bounds.MOST_READS) if "TIFF" not in name else strips(picture_bounds.MOST_STRIPS)

    def work() -> None:
        for one in (train, EvalTransform(32)):
            try:
                one(data)
            except BrokenSampleError:
                continue

    taken = seconds(work)
    with capsys.disabled():
        print(f"\n{name}: {taken:.1f} s")
    assert taken < MOST_S


TEXTS = {
    "lists": "[" + "[]," * (MAX_TEXT_BYTES // 3 - 2) + "[]]",
    "objects": "{" + ",".join(f'"{n}":{{}}' for n in range(80_000)) + "}",
    "numbers": '{"a": ' + "9" * 4000 + ', "b": [' + "1e9," * (MAX_TEXT_BYTES // 4 - 2000) + "1]}",
    "digits": '{"a": 0.' + "9" * (MAX_TEXT_BYTES - 20) + "}",
    "escapes": '{"caption": "' + "\\ud83d\\ude00" * (MAX_TEXT_BYTES // 12 - 4) + '"}',
    "deep": "[" * MAX_TEXT_BYTES,
}


@pytest.mark.parametrize("name", TEXTS)
def test_json_of_a_sample_takes_a_bounded_time(name: str) -> None:
    data = TEXTS[name].encode()
    assert len(data) <= MAX_TEXT_BYTES
    chosen = selection("json:caption", [], [], FilterConfig(fields=["a>=0.3"]))

    def work() -> None:
        for part in (
            lambda: caption_of({"json": data}, "json:caption"),
            lambda: chosen.check(RawSample("", "", 0, {"json": data}), "a"),
        ):
            try:
                part()
            except BrokenSampleError:
                continue

    assert seconds(work) < MOST_S / 10
    if name in ("lists", "objects", "deep"):
        with pytest.raises(BrokenSampleError, match="bad_json"):
            caption_of({"json": data}, "json:caption")


@pytest.mark.slow
def test_the_longest_caption_takes_a_bounded_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Words as long as they may be, of letters that no token joins."""
    config = ModelConfig("ViT-B-32")
    clip = tokenizer(config, architecture(config))
    random = np.random.default_rng(0)
    texts = []
    for letters, length in (
        ("abcdefghijklmnopqrstuvwxyz", 1024),
        ("\u0416\u042f\u0414\u0424", 512),
        ("\U00010400\U00010401\U00010428", 256),
    ):
        words = " ".join("".join(random.choice(list(letters), length)) for _ in range(40))
        texts.append(words)
    worst = max(seconds(partial(clip, [text])) for text in texts)
    with capsys.disabled():
        print(f"\ncaption: {worst:.1f} s")
    assert worst < MOST_S and last_place(clip, 77)


def test_stored_features_take_a_bounded_time() -> None:
    """A member may have 64 MiB; only a row is read."""
    out = np.zeros(4, np.float16)
    data = b"\x93NUMPY\x01\x00" + b"\xff" * (1 << 20)

    def work() -> None:
        with pytest.raises(BrokenSampleError):
            StoredFeatures("npy", 4, "float16")(data, CounterRNG(0), out)

    assert seconds(work) < MOST_S / 10


def test_the_documentation_states_the_bound() -> None:
    text = (Path(__file__).parents[2] / "docs/security.md").read_text()
    assert f"{MOST_S:.0f} s of one core" in text
