"""Reads the header of a common JPEG. Pillow would take a quarter of a small picture's decoding time for this."""

from typing import NamedTuple

START = b"\xff\xd8"
SCAN = 0xDA
# Frames that are coded by Huffman: baseline, extended and progressive.
HUFFMAN_FRAMES = (0xC0, 0xC1, 0xC2)
# Colour channels -> Pillow's mode.
MODES = {1: "L", 3: "RGB"}
QUANTISATION = 0xDB
# Huffman tables, restart intervals and comments: Pillow does not look into them.
UNREAD_SEGMENTS = (0xC4, 0xDD, 0xFE)
# Application segments: the words that they begin with, and the bytes that Pillow reads of them.
READ_SEGMENTS = {0xE0: (b"JFIF\0", 12), 0xEE: (b"Adobe", 12)}
# A quantisation table of 8 bits, and its number.
TABLE_BYTES = 65
# More segments before the pixels are unusual.
MAX_SEGMENTS = 64


class Frame(NamedTuple):
    """The size and mode of a JPEG's pixels, by its header."""

    width: int
    height: int
    mode: str


def usual_frame(data: bytes) -> Frame | None:
    """The frame of a JPEG without an orientation that Pillow would also open. None for another file: Pillow reads it.

    Before the pixels come only segments of the usual kinds and lengths, checked as Pillow checks them: no EXIF, no
    profile, no second picture. What follows is not read.
    """
    if not data.startswith(START):
        return None
    frame = None
    at = len(START)
    for _ in range(MAX_SEGMENTS):
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        end = at + 2 + length
        if length < 2 or end > len(data) or data[at] != 0xFF:
            return None
        marker = data[at + 1]
        segment = data[at + 4 : end]
        if marker == SCAN:
            return frame
        if marker in HUFFMAN_FRAMES and frame is None:
            frame = _frame(segment)
            if frame is None:
                return None
        elif not _is_usual(marker, segment):
            return None
        at = end
    return None


def _frame(segment: bytes) -> Frame | None:
    """The frame of a segment with 8 bits and one or three channels; else None."""
    mode = MODES.get(segment[5]) if len(segment) > 5 else None
    if mode is None or segment[0] != 8 or len(segment) != 6 + 3 * segment[5]:
        return None
    height = int.from_bytes(segment[1:3], "big")
    width = int.from_bytes(segment[3:5], "big")
    if width == 0 or height == 0:
        return None
    return Frame(width, height, mode)


def _is_usual(marker: int, segment: bytes) -> bool:
    if marker == QUANTISATION:
        return len(segment) % TABLE_BYTES == 0 and all(number < 16 for number in segment[::TABLE_BYTES])
    begins, least = READ_SEGMENTS.get(marker, (b"", 0))
    return marker in UNREAD_SEGMENTS or (
        marker in READ_SEGMENTS and segment.startswith(begins) and len(segment) >= least
    )
