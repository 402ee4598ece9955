"""The header of a usual JPEG is read without Pillow, and with the same result."""

import io
from collections.abc import Iterator

import pytest
from PIL import Image

from clipscale.data import picture as picture_module
from clipscale.data.jpeg import usual_frame
from clipscale.data.picture import Picture
from clipscale.data.sample import BrokenSampleError
from tests.data.files import photograph

PHOTOGRAPH = Image.open(io.BytesIO(photograph(32, 1))).crop((0, 0, 32, 24))


def jpeg(mode: str = "RGB", **options: object) -> bytes:
    out = io.BytesIO()
    PHOTOGRAPH.convert(mode).save(out, "JPEG", **options)
    return out.getvalue()


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


PLAIN = jpeg()
ADOBE = b"Adobe\0\x64\0\0\0\0\1"
USUAL = {
    "plain": PLAIN,
    "grey": jpeg("L"),
    "progressive": jpeg(progressive=True),
    "whole colour": jpeg(subsampling="4:4:4"),
    "restarts": jpeg(restart_marker_rows=1),
    "a comment": PLAIN[:2] + segment(0xFE, b"Exif\0\0") + PLAIN[2:],
    "Adobe's": PLAIN[:2] + segment(0xEE, ADOBE) + PLAIN[2:],
}
OTHER = {
    "inks": jpeg("CMYK"),
    "turned": jpeg(exif=turned()),
    "a profile": jpeg(icc_profile=bytes(200)),
    "a short JFIF": PLAIN[:2] + segment(0xE0, b"JFIF\0") + PLAIN[20:],
    "a fill byte": PLAIN[:2] + b"\xff" + PLAIN[2:],
    "an arithmetic code": PLAIN.replace(b"\xff\xc0", b"\xff\xc9", 1),
    "lossless": PLAIN.replace(b"\xff\xc0", b"\xff\xc3", 1),
    "another frame behind the scan": PLAIN + segment(0xC9, b"\x08\0\x08\0\x08\x01\1\x11\0"),
    "two frames": PLAIN.replace(b"\xff\xc0", segment(0xC0, b"\x08\0\x08\0\x08\x01\1\x11\0") + b"\xff\xc0", 1),
    "many scans": PLAIN + 101 * b"\xff\xda",
    "many profiles": PLAIN[:2] + 101 * segment(0xE1, b"Exif\0\0") + PLAIN[2:],
    "many segments": PLAIN[:2] + 99 * segment(0xFE, b"") + PLAIN[2:],
    "many more segments": PLAIN[:2] + 6000 * segment(0xFE, b"") + PLAIN[2:],
    "no rows": PLAIN.replace(b"\xff\xc0\0\x11\x08\0\x18", b"\xff\xc0\0\x11\x08\0\0", 1),
    "65,535 rows and columns": PLAIN.replace(b"\x08\0\x18\0\x20", b"\x08\xff\xff\xff\xff", 1),
}


def outcome(data: bytes) -> tuple[object, ...]:
    """What is known of a picture, and its pixels; or why it is refused."""
    try:
        picture = Picture.read(data)
        size = picture.width, picture.height, picture.type, picture.mode, picture.orientation
        return *size, picture.decode().tobytes()
    except BrokenSampleError as error:
        return (error.reason,)


def damaged() -> Iterator[bytes]:
    """A header with every byte replaced by two others, and cut off at every place."""
    for at in range(PLAIN.index(b"\xff\xda") + 12):
        yield PLAIN[:at]
        for value in (PLAIN[at] ^ 1, 0xFF):
            yield PLAIN[:at] + bytes([value]) + PLAIN[at + 1 :]


def pillows(monkeypatch: pytest.MonkeyPatch, files: list[bytes]) -> list[tuple[object, ...]]:
    """The outcomes where Pillow reads every header."""
    with monkeypatch.context() as patch:
        patch.setattr(picture_module, "usual_frame", lambda data: None)
        return [outcome(data) for data in files]


@pytest.mark.parametrize("kind", USUAL)
def test_usual_jpegs_are_read_without_pillow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = pillows(monkeypatch, [USUAL[kind]])
    monkeypatch.setattr(picture_module, "open_picture", lambda *given: pytest.fail("Pillow was asked"))
    assert [outcome(USUAL[kind])] == theirs and len(theirs[0]) > 1


@pytest.mark.parametrize("kind", OTHER)
def test_other_jpegs_are_taken_or_refused_as_by_pillow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [outcome(OTHER[kind])] == pillows(monkeypatch, [OTHER[kind]])


def test_damaged_headers_are_taken_or_refused_as_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [*damaged()]
    theirs = pillows(monkeypatch, files)
    wrong = [(number, mine[:5], pillow[:5]) for number, (data, pillow) in enumerate(zip(files, theirs))
             if (mine := outcome(data)) != pillow]  # fmt: skip
    assert not wrong, wrong[:5]
    read = sum(usual_frame(data) is not None for data in files)
    taken = sum(len(pillow) > 1 for pillow in theirs)
    assert 100 < read < len(files) and 100 < taken < len(files), (read, taken, len(files))
