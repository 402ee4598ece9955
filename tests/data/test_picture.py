"""Decoding gives the pixels of open_clip's transforms, and every unusable sample has a reason."""

import io
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import open_clip
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from clipscale.common import files
from clipscale.config.data import AugmentConfig
from clipscale.data import picture as picture_module
from clipscale.data.eval_transform import EvalTransform
from clipscale.data.order import CounterRNG
from clipscale.data.picture import Picture
from clipscale.data.sample import IMAGE_TYPES, BrokenSampleError, image_bytes
from clipscale.data.train_transform import TrainTransform
from clipscale.tools.embed.pictures import thumbnail
from tests.data.files import photograph, picture

SAMPLES = files.read_yaml(Path(__file__).with_name("samples.yaml"))


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def encode(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def published(data: bytes, **options: object) -> np.ndarray:
    """The pixels that open_clip's evaluation transform makes of a picture that a data set has converted to RGB."""
    transform = open_clip.image_transform(64, is_train=False, mean=(0.0,) * 3, std=(1.0,) * 3, **options)
    return np.round(transform(opened(data).convert("RGB")).numpy() * 255).astype(np.uint8)


@pytest.mark.parametrize("mode", ["shortest", "squash", "longest"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(301, 98), (97, 301), (64, 64), (33, 32)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_evaluation_pixels_are_open_clips_bit_for_bit(
    mode: str, interpolation: str, size: tuple[int, int], kind: str
) -> None:
    data = picture(1, size, kind)
    reference = published(data, resize_mode=mode, interpolation=interpolation)
    assert np.array_equal(EvalTransform(64, mode=mode, interpolation=interpolation)(data), reference)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("size", [(64, 64), (301, 97), (97, 301), (640, 400), (33, 33)])
def test_training_pixels_of_whole_jpegs_are_open_clips(size: tuple[int, int], mode: str) -> None:
    """At scale 1 open_clip's transform is not random: it takes all of a square picture, the middle of a long one."""
    width, height = size
    source = opened(photograph(640, width)).crop((0, 0, width, height)).convert(mode)
    options = {"is_train": True, "mean": (0.0,) * 3, "std": (1.0,) * 3, "aug_cfg": {"scale": (1.0, 1.0)}}
    transform = open_clip.image_transform(64, **options)
    for quality, sampling in ((75, "4:2:0"), (95, "4:4:4")):
        data = encode(source, "JPEG", quality=quality, **({} if mode == "L" else {"subsampling": sampling}))
        reference = transform(opened(data)).numpy() * 255
        out = np.zeros((3, 64, 64), np.uint8)
        TrainTransform(64, AugmentConfig((1.0, 1.0)))(data, CounterRNG(0), out)
        difference = np.abs(out - reference)
        assert difference.mean() < 0.35 and difference.max() < 4, (quality, difference.mean(), difference.max())


@pytest.mark.parametrize(
    ("mode", "kind"),
    [*((mode, "PNG") for mode in ("L", "LA", "P", "RGBA", "1")), ("CMYK", "JPEG"), ("YCbCr", "JPEG")],
)
def test_modes_become_rgb_as_pillow_converts_them(mode: str, kind: str) -> None:
    data = encode(opened(picture(2, (12, 9))).convert(mode), kind)
    assert np.array_equal(Picture.read(data).decode(), np.asarray(opened(data).convert("RGB")))


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    values = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    grey = Picture.read(encode(Image.fromarray(values), "PNG")).decode()
    assert np.abs(grey[:, :, 0] - values / 257).max() <= 0.51, grey[:, :, 0]
    assert np.array_equal(grey[:, :, 0], grey[:, :, 2])


def png(values: np.ndarray, colour: int) -> bytes:
    """A PNG of 16 bits a channel, (H, W, channels)."""
    height, width, _ = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([16, colour, 0, 0, 0])
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, content) for kind, content in chunks)


def chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return len(content).to_bytes(4, "big") + kind + content + check.to_bytes(4, "big")


@pytest.mark.parametrize("most", [65535, 4095])
@pytest.mark.parametrize("colour", [0, 2, 4])
def test_sixteen_bits_are_the_same_picture_wherever_it_is_decoded(colour: int, most: int) -> None:
    """Pictures are grey, RGB, or grey with alpha. They use all of 16 bits, or the lower 12."""
    channels = {0: 1, 2: 3, 4: 2}[colour]
    values = np.random.default_rng(0).integers(0, most + 1, (64, 64, channels))
    data = png(values, colour)
    trained = Picture.read(data).decode()
    evaluated = EvalTransform(64)(data).transpose(1, 2, 0)
    assert np.array_equal(evaluated, trained) and len(np.unique(trained)) > 10
    assert np.abs(trained[..., 0] - values[..., 0] / 257).max() < 1
    shown = np.asarray(opened(thumbnail(data, 64)))
    assert shown.shape == trained.shape and np.abs(shown.mean() - trained.mean()) < 5


def test_the_embeddings_inputs_of_different_greys_differ() -> None:
    """When all twelve became white, `data select` kept one of twelve."""
    pixels = [EvalTransform(8)(png(np.full((9, 9, 1), level), 0)) for level in range(2000, 60_000, 5000)]
    assert len({each.tobytes() for each in pixels}) == 12 and all(len(np.unique(each)) == 1 for each in pixels)


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
@pytest.mark.parametrize("behind", [False, True])
def test_a_pngs_large_texts_and_profiles_do_not_matter(kind: bytes, behind: bool) -> None:
    whole = picture(0, (30, 20))
    packed = zlib.compress(bytes(3 << 20))
    text = chunk(kind, b"about\0\1\0\0\0" + packed if kind == b"iTXt" else b"about\0\0" + packed)
    at = len(whole) - 12 if behind else 33
    assert np.array_equal(Picture.read(whole[:at] + text + whole[at:]).decode(), Picture.read(whole).decode())


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_camera_orientation_is_undone(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(opened(picture(5, (240, 160))), kind, exif=exif)
    upright = ImageOps.exif_transpose(opened(data)).convert("RGB")
    got = Picture.read(data).decode()
    assert got.shape == (upright.height, upright.width, 3)
    assert np.abs(got.astype(int) - np.asarray(upright)).max() <= 1


def test_pillow_decodes_a_jpeg_that_the_strict_decoder_rejects() -> None:
    data = picture(2, (40, 40), "JPEG")
    stray = data[:2] + b"\xff\xe1\x00\x08abcdef\x00\x00" + data[2:]  # bytes between two markers
    with pytest.raises(ValueError):
        simplejpeg.decode_jpeg(stray)
    difference = np.abs(Picture.read(stray).decode().astype(int) - Picture.read(data).decode())
    assert difference.max() <= 1


UNREADABLE = [b"x", b"\xff\xd8\xff", b"<svg/>", b"%!PS-Adobe-3.0 EPSF-3.0\n"]
UNREADABLE += [picture(0, (32, 32), kind) for kind in ("TIFF", "AVIF", "ICO")]  # a TIFF's tile can take gigabytes


UNREADABLE += [photograph(64, 1)[:-900] + b"\xff\xd9"]  # ends early, by its end marker
_SMALL = {kind: picture(0, (8, 8), kind) for kind in ("JPEG", "PNG")}
_STARTS = [b"\xff\xe1\0\x08Exif\0\0" * 900, b"\xff" * 100_000, b"\xff\xe3\0\x02" * 10_000]
_STARTS += [b"\xff\xed\0\x10Photoshop 3.0\0" * 900]
UNREADABLE += [_SMALL["JPEG"][:2] + start + _SMALL["JPEG"][2:] for start in _STARTS]
UNREADABLE += [_SMALL["JPEG"].replace(b"\xff\xc0", b"\xff\xc9")]  # an arithmetic code
UNREADABLE += [b"GIF89a\1\0\1\0\0\0\0!\xfe" + b"\1a" * 20_000 + b"\0,\0\0\0\0\1\0\1\0\0\2\2D\1\0;"]
_EMPTY = b"\0\0\0\0prVt" + zlib.crc32(b"prVt").to_bytes(4, "big")
UNREADABLE += [_SMALL["PNG"][:33] + _EMPTY * 100_000 + _SMALL["PNG"][33:]]


@pytest.mark.parametrize("data", [*UNREADABLE, picture(0, (50, 50), "JPEG")[:-300], picture(0, (50, 50))[:-200]])
def test_unreadable_pictures_have_their_reason(data: bytes) -> None:
    with pytest.raises(BrokenSampleError) as error:
        Picture.read(data).decode()
    assert error.value.reason == "unreadable_image"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xef\xbb\xbf\n<!DOCTYPE html><html>", "a web page (HTML), no picture"),
        (b'{"error": "gone"}', "JSON, no picture"),
        (b"not found", "text, no picture"),
        (bytes(999), "zeros, no picture"),
        (b"\xff\xd8\xff", "a damaged JPEG"),
        (picture(0, (32, 32), "TIFF"), "a TIFF, no picture"),
        (picture(0, (32, 32), "AVIF"), "an AVIF, no picture"),
        (b"\0\0\0\x1cftyphevc", "a HEIC, no picture"),
        (b"\xfe\xfe", r"begins with b'\xfe\xfe', no picture"),
    ],
)
def test_the_line_about_an_unreadable_picture_says_what_it_is(data: bytes, words: str) -> None:
    with pytest.raises(BrokenSampleError) as error:
        Picture.read(data)
    assert str(error.value).startswith(f"unreadable_image: {words}")


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@settings(max_examples=100)
@given(
    st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP"]),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=10),
    st.floats(0, 1),
)
def test_damaged_pictures_are_decoded_or_counted(kind: str, hits: list[tuple[float, int]], cut: float) -> None:
    data = bytearray(picture(1, (40, 30), kind))
    for where, value in hits:
        data[int(where * where * (len(data) - 1))] = value  # rather in the headers
    out = np.zeros((3, 16, 16), dtype=np.uint8)
    cut_off = bytes(data[: int(len(data) * (1 - cut**4))])
    try:
        Picture.read(cut_off, 100_000)
        TrainTransform(16, AugmentConfig((0.5, 1.0), flip=0.5))(cut_off, CounterRNG(1), out)
    except BrokenSampleError as error:
        assert error.reason in ("unreadable_image", "huge_image")
        assert not out.any(), "nothing is written for a broken picture"


def test_a_jpeg_of_many_scans_is_broken_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan has a few bytes, and takes as long as a whole picture. One such file held a worker for two minutes."""
    data = encode(opened(picture(2, (40, 40))), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    many = data[:-2] + 20 * scan + data[-2:]
    Picture.read(many)
    with pytest.raises(BrokenSampleError, match="too_many_scans"):
        Picture.read(data[:-2] + 120 * scan + data[-2:])
    monkeypatch.setattr(picture_module, "MAX_SCANNED_PIXELS", 20 * 40 * 40)  # as a large picture's are too many
    Picture.read(data)
    with pytest.raises(BrokenSampleError, match="too_many_scans"):
        Picture.read(many)


def test_slow_kinds_of_pictures_have_fewer_pixels() -> None:
    """90 bytes of WebP can ask for 1.7 GiB."""
    frames = [Image.new("RGB", (60, 60), colour) for colour in ("red", "blue")]
    data = encode(frames[0], "WEBP", save_all=True, append_images=frames[1:])
    assert Picture.read(data, 4 * 60 * 60).decode()[0, 0, 0] > 200
    deep = encode(Image.new("I;16", (60, 60)), "PNG")  # and 16 bits take twice the time of 8
    Picture.read(deep, 2 * 60 * 60)
    runs = bytearray(encode(Image.new("P", (60, 60)), "BMP"))
    runs[30] = 1
    inks = encode(Image.new("CMYK", (60, 60)), "JPEG")
    rows = encode(Image.new("1", (1, 1_100_000)))
    slow = [(bytes(each), 60 * 60) for each in (deep, inks, runs)]
    for refused, most in ((data, 2 * 60 * 60), (rows, 2e6), *slow):
        with pytest.raises(BrokenSampleError, match="huge_image"):
            Picture.read(refused, most)


def test_a_palette_with_transparency_prints_nothing(tmp_path: Path) -> None:
    Image.new("P", (9, 9)).save(tmp_path / "a.png", transparency=bytes(range(9)))
    code = "from clipscale.data.picture import Picture; Picture.read(open('a.png', 'rb').read()).decode()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout + done.stderr == b""


@pytest.mark.parametrize("kind", ["JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP"])
def test_the_name_of_a_pictures_content_is_one_that_readers_take(kind: str) -> None:
    """Phones write MPO: two JPEGs in one file. Its first picture is decoded as a JPEG is."""
    first = opened(photograph(64, 1)).crop((0, 0, 64, 48))
    second = Image.new("RGB", (64, 48), "red")
    data = encode(first, kind, **({"save_all": True, "append_images": [second]} if kind == "MPO" else {}))
    picture = Picture.read(data)
    assert image_bytes({picture.type: data}) == data
    assert Image.registered_extensions()[f".{picture.type}"] == kind.replace("MPO", "JPEG")
    assert np.array_equal(picture.decode(), np.asarray(opened(data).convert("RGB")))


def test_every_suffix_of_the_formats_is_taken() -> None:
    kinds = {"JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP"}
    known = {suffix[1:] for suffix, kind in Image.registered_extensions().items() if kind in kinds}
    assert set(IMAGE_TYPES) >= known
