"""Decodes pictures: hostile bytes to upright pixels in uint8, within limits of memory and time.

C = 3: channels, H, W: the picture's pixels.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from clipscale.data.content import describe_content
from clipscale.data.jpeg import usual_frame
from clipscale.data.sample import BrokenSampleError

# Pillow's name of a format -> the extension of a written picture. An MPO is a JPEG followed by more pictures.
EXTENSION_OF = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp"}
Image.init()
# Pillow's warnings do not say which picture they are about. Damaged pictures are counted, and MAX_PIXELS limits sizes.
warnings.filterwarnings("ignore", module=r"PIL\.")
# The decoders that Pillow may use. EPS would run a program. A TIFF may claim tiles larger than its picture.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
# Most pixels of a picture: a quarter of a gigabyte of RGB. Pillow warns of more.
MAX_PIXELS = 89_478_485
# Most rows or columns of a picture. Each row costs time and memory, even one of a single pixel, and a picture may be
# turned. JPEG, WebP and GIF have at most 65,535.
MAX_SIDE = 1_048_576
# The costs of a pixel, by which MAX_PIXELS is divided. Pillow holds three canvases while it decodes a WebP, which may
# be animated.
WEBP_COST = 3
# A PNG of 16 bits or a CMYK JPEG takes at least twice the time to decode. It may have 44 million pixels.
SLOW_COST = 2
# An interlaced PNG takes at least four times the time.
INTERLACED_COST = 4
# Pillow decodes a run-length encoded BMP in Python. It may have 5.6 million pixels.
RUN_LENGTH_COST = 16
# The marker of a scan of a JPEG.
SCAN = b"\xff\xda"
# The marker of a scan, or the header of a frame in an arithmetic or lossless code, with length and depth. Compressed
# data has no such bytes. An arithmetic code takes four times as long to decode, and no browser shows it.
SCANS_AND_CODES = re.compile(rb"\xff(?:\xda|[\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf]\x00[\x0b\x11\x14]\x08)")
# Most scans of a progressive JPEG; 10 are usual. A scan of a few bytes takes as long to decode as a whole picture.
MAX_SCANS = 100
# Most pixels of all scans of a JPEG together: 10 scans of the largest picture.
MAX_SCANNED_PIXELS = 10 * MAX_PIXELS
# Most EXIF or Photoshop segments of a JPEG, or colour profiles of a PNG; one is usual. Pillow joins EXIF segments in
# quadratic time, and reads thousands of records in each Photoshop segment.
MAX_PROFILES = 100
# Most reads by Pillow of a picture's header: about three for each segment of a JPEG, chunk of a PNG or block of a GIF.
MAX_HEADER_READS = 1 << 14
# Most reads of its pixels. A PNG of 64 MiB in chunks of 8 kB takes 32,768.
MAX_READS = 1 << 18
_ORIENTATION = 0x0112
# Chunks of a PNG that hold texts or a colour profile. Pillow unpacks them, and refuses them above a megabyte.
_PNG_TEXTS = (b"zTXt", b"iTXt", b"iCCP")
# The text that may hold the orientation.
_XMP = b"XML:com.adobe.xmp"
# Pixels converted or turned at a time: this bounds temporary memory and time.
STRIP_PIXELS = 1 << 18


@contextmanager
def broken_pictures() -> Iterator[None]:
    """Turn every error of a decoder into BrokenSampleError: hostile bytes cause many kinds."""
    try:
        yield
    except BrokenSampleError:
        raise
    except Image.DecompressionBombError as error:
        raise BrokenSampleError("huge_image", str(error)) from error
    except Exception as error:
        raise BrokenSampleError("unreadable_image", f"{type(error).__name__}: {error}") from error


def open_picture(data: bytes, most: float = MAX_PIXELS) -> Image.Image:
    """A picture whose header has been read. Raises BrokenSampleError: `huge_image`, `too_many_scans`,
    `unreadable_image`; and Pillow's many errors."""
    check_profiles(data)
    if data.startswith(b"\x89PNG") and any(chunk_type in data for chunk_type in _PNG_TEXTS):
        data = without_texts(data)
    source = BoundedReads(data)
    try:
        image: Image.Image = Image.open(source, formats=FORMATS)
    except UnidentifiedImageError:
        content = describe_content(data) or f"begins with {data[:8]!r}"
        if "damaged" not in content:
            content = f"{content}, no picture of {', '.join(FORMATS)}"
        raise BrokenSampleError("unreadable_image", content) from None
    source.reads_left = MAX_READS
    check_pixels(*image.size, most / decoding_cost(image, data))
    return image


def check_profiles(data: bytes) -> None:
    """Raise BrokenSampleError for a picture of too many EXIF or Photoshop segments or colour profiles."""
    if sum(map(data.count, (b"Exif\0\0", b"Photoshop 3.0\0", b"iCCP"))) > MAX_PROFILES:
        raise BrokenSampleError("unreadable_image", f"over {MAX_PROFILES} profiles")


def without_texts(data: bytes) -> bytes:
    """A PNG without its chunks of _PNG_TEXTS, apart from XMP."""
    parts = [data[:8]]
    start = 8
    while start < len(data) and len(parts) < MAX_READS:
        end = start + 12 + int.from_bytes(data[start : start + 4], "big")
        if data[start + 4 : start + 8] not in _PNG_TEXTS or data.startswith(_XMP, start + 8):
            parts.append(data[start:end])
        start = end
    return b"".join([*parts, data[start:]])


class BoundedReads(io.BytesIO):
    """A picture's bytes, in a bounded number of reads: each takes Pillow microseconds."""

    reads_left = MAX_HEADER_READS

    def read(self, size: int | None = -1) -> bytes:
        self.reads_left -= 1
        if self.reads_left < 0:
            raise BrokenSampleError("unreadable_image", "its headers or pixels are in too many pieces")
        return super().read(size)


def decoding_cost(image: Image.Image, data: bytes) -> int:
    """The cost of a pixel of this picture, in time or memory, relative to an ordinary one.

    Raises BrokenSampleError for a JPEG of many scans or of another code.
    """
    if image.format == "WEBP":
        return WEBP_COST
    if image.format == "BMP":
        return RUN_LENGTH_COST if data[30] in (1, 2) else 1  # the header's field for the compression
    if image.format == "PNG":
        if data[28]:  # the header's field for interlacing
            return INTERLACED_COST
        return SLOW_COST if data[24] == 16 else 1  # the depth in bits
    if image.format in ("JPEG", "MPO"):
        check_code(data, image.width, image.height)
    return SLOW_COST if image.mode == "CMYK" else 1


def check_code(jpeg: bytes, width: int, height: int) -> None:
    """Raise BrokenSampleError for a JPEG of many scans or of another code."""
    found = SCANS_AND_CODES.findall(jpeg)
    scans = found.count(SCAN)
    if scans > MAX_SCANS or scans * width * height > MAX_SCANNED_PIXELS:
        raise BrokenSampleError("too_many_scans", f"{scans} of {width} x {height} pixels")
    if len(found) > scans:
        raise BrokenSampleError("unreadable_image", "a JPEG in an arithmetic or lossless code")


def check_pixels(width: int, height: int, most: float = MAX_PIXELS) -> None:
    """Raise BrokenSampleError `huge_image` for a width and height of more than `most` pixels, or too long a side."""
    if width * height > most or max(width, height) > MAX_SIDE:
        raise BrokenSampleError("huge_image", f"{width} x {height} pixels")


@dataclass(frozen=True)
class Picture:
    """A picture whose header has been read. Its upright width and height are known, its pixels are not decoded yet.

    As in open_clip, transparency is dropped and not composited. Unlike open_clip, this resolves palettes before
    resizing, scales 16-bit pictures to 8 bits instead of clipping them, and applies the EXIF orientation. A file of
    several pictures (MPO, GIF, WebP) gives its first one.
    """

    # The bytes of the file.
    data: bytes
    # The size of its pixels as they are stored.
    stored_width: int
    stored_height: int
    # Its extension in IMAGE_TYPES, by its content, whatever its name.
    type: str
    # Pillow's name of the pixels' format.
    mode: str
    # How the pixels of the file are to be turned: 1 to 8, as in EXIF.
    orientation: int = 1
    # The file, opened by Pillow; None if it is not open.
    opened: Image.Image | None = None

    @classmethod
    def read(cls, data: bytes, most: float = MAX_PIXELS) -> "Picture":
        """Read the header. `most`: the limit on pixels. With math.inf only Pillow's own limit holds.

        Raises BrokenSampleError: `huge_image`, `too_many_scans`, `unreadable_image`.
        """
        with broken_pictures():
            frame = usual_frame(data)
            if frame and frame.width * frame.height <= MAX_PIXELS:
                # `usual_frame` accepts no profile, so `check_profiles` is not called.
                check_code(data, frame.width, frame.height)
                check_pixels(frame.width, frame.height, most)
                return cls(data, frame.width, frame.height, "jpg", frame.mode)
            image = open_picture(data, most)
            orientation = image.getexif().get(_ORIENTATION, 1) if "exif" in image.info else 1
            if orientation not in range(1, 9):
                orientation = 1
            return cls(
                data,
                image.width,
                image.height,
                EXTENSION_OF[str(image.format)],
                image.mode,
                orientation,
                image,
            )

    @property
    def is_on_its_side(self) -> bool:
        """Whether the rows of the file are the columns of the upright picture."""
        return self.orientation >= 5

    @property
    def width(self) -> int:
        return self.stored_height if self.is_on_its_side else self.stored_width

    @property
    def height(self) -> int:
        return self.stored_width if self.is_on_its_side else self.stored_height

    def decode(self) -> np.ndarray:
        """(H, W, C) uint8 RGB, upright. Raises BrokenSampleError."""
        with broken_pictures():
            pixels = None
            if self.type == "jpg" and self.mode in ("RGB", "L"):
                # The strict decoder rejects defects with ValueError. Pillow tolerates defects such as stray bytes
                # between markers. But Pillow fills a picture that ends early with grey, so an early end is an error.
                try:
                    pixels = simplejpeg.decode_jpeg(self.data, colorspace="RGB")
                except ValueError as error:
                    if "premature end" in str(error):
                        raise
            if pixels is None:
                pixels = decode_by_pillow(self.opened or open_picture(self.data))
            return self._turn_upright(pixels)

    def _turn_upright(self, pixels: np.ndarray) -> np.ndarray:
        """Follows the EXIF standard: swap the axes, then reverse the rows, then the columns."""
        if self.is_on_its_side:
            pixels = pixels.swapaxes(0, 1)
        down = -1 if self.orientation in (3, 4, 7, 8) else 1
        across = -1 if self.orientation in (2, 3, 6, 7) else 1
        pixels = pixels[::down, ::across]
        if not self.is_on_its_side:
            return np.ascontiguousarray(pixels)
        upright = np.empty(pixels.shape, np.uint8)
        # In strips: a copy of the whole picture at once takes three times as long.
        for columns in strips(self.width, self.height):
            for channel in range(3):
                upright[:, columns, channel] = pixels[:, columns, channel]
        return upright


def turned_upright(data: bytes) -> bytes:
    """The picture turned as training turns it, uncompressed. Without an EXIF orientation it is returned as it is.

    Raises BrokenSampleError.
    """
    picture = Picture.read(data)
    if picture.orientation == 1:
        return data
    turned = io.BytesIO()
    Image.fromarray(picture.decode()).save(turned, "BMP")
    return turned.getvalue()


def strips(length: int, width: int) -> Iterator[slice]:
    """Parts of `length` rows of `width` pixels, each of about STRIP_PIXELS pixels."""
    rows = max(1, STRIP_PIXELS // width)
    return (slice(top, min(top + rows, length)) for top in range(0, length, rows))


def rgb(image: Image.Image) -> Image.Image:
    """The picture in RGB, 16 bits of grey scaled to 8 as in `decode_by_pillow`. Pillow's own conversion clips them to
    white."""
    if image.mode.startswith("I"):
        return Image.fromarray(decode_by_pillow(image))
    return image.convert("RGB")


def decode_by_pillow(image: Image.Image) -> np.ndarray:
    """Decode to (H, W, C) uint8 RGB. Greys above 8 bits (mode I or I;16) are scaled: 65,535 is white."""
    image.load()
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for rows in strips(image.height, image.width):
        strip = image.crop((0, rows.start, image.width, rows.stop))
        if image.mode.startswith("I"):
            strip = Image.fromarray((np.asarray(strip).clip(0, 65535) / 257).round().astype(np.uint8))
        pixels[rows] = np.asarray(strip.convert("RGB"))
    return pixels
