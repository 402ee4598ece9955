"""Opens pictures of strangers. Their pixels, their scans and their parts are bounded before they are decoded, and so is the time.

Pillow reads a picture's parts in Python: a PNG of 64 MiB can have five million chunks, and takes a minute.
"""

import io
import math
import struct
from typing import Any

from PIL import Image

from clipscale.data.sample import BrokenSampleError

Image.init()
FORMATS = tuple(name for name in ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF") if name in Image.OPEN)
"""The decoders Pillow may use. EPS is not among them: it would run a program."""
MOST_SCANS, MOST_SCANNED = 100, 2**30
"""Scans of a JPEG, and their pixels together. Encoders make ten scans; 2**30 pixels take about five seconds."""
MOST_READS = 1 << 20
"""Reads by which Pillow takes in a picture: four for a chunk of a PNG, which has 8 KiB or more. They take about a second."""
MOST_STRIPS = 1 << 16
"""Strips or tiles of a TIFF. Of 8 KiB each, as the format's authors advise, the largest picture has 33,000."""
_STRIPS = (273, 279, 324, 325)
"""The TIFF tags that list their offsets and sizes."""


class _Counted(io.BytesIO):
    """Bytes that can be read so many times."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._left = MOST_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise BrokenSampleError("huge_image", f"more than {MOST_READS} parts")
        return super().read(size)


def open_picture(data: bytes, max_pixels: float = math.inf) -> Image.Image:
    """A picture whose header has been read. Raises BrokenSampleError `huge_image`, and Pillow's errors, of many kinds."""
    if data[:2] in (b"II", b"MM"):
        _check_strips(data)
    image: Image.Image = Image.open(_Counted(data), formats=FORMATS)
    if image.width * image.height > max_pixels:
        raise BrokenSampleError("huge_image", f"{image.width} x {image.height} pixels")
    if image.format in ("JPEG", "MPO"):
        check_scans(data, image)
    return image


def check_scans(data: bytes, image: Image.Image) -> None:
    """Raise BrokenSampleError `huge_image` for a JPEG in more scans than decoding can take. Each scan costs a pass over all pixels."""
    scans = data.count(b"\xff\xda")
    if scans > MOST_SCANS or scans * image.width * image.height > MOST_SCANNED:
        raise BrokenSampleError("huge_image", f"{image.width} x {image.height} pixels in {scans} scans")


def _check_strips(data: bytes) -> None:
    """Raise BrokenSampleError for a TIFF of too many strips: Pillow makes an object of each when it opens the file."""
    order = "<" if data[:2] == b"II" else ">"
    big = data[2:4] in (b"+\0", b"\0+")

    def unpack(kind: str, at: int) -> tuple[Any, ...]:
        return struct.unpack_from(order + kind, data, at)

    try:
        (at,) = unpack("Q", 8) if big else unpack("I", 4)
        (entries,) = unpack("Q" if big else "H", at)
        first, size = (at + 8, 20) if big else (at + 2, 12)
        for place in range(first, first + size * min(entries, 1 << 16), size):
            tag, _, count = unpack("HHQ" if big else "HHI", place)
            if tag in _STRIPS and count > MOST_STRIPS:
                raise BrokenSampleError("huge_image", f"{count} strips")
    except struct.error:
        return  # Pillow says what is wrong with it
