"""Says what a file or a picture is by its first bytes, for messages about those that cannot be read."""

import re
from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of file."""

    # Matches the first bytes of such a file.
    beginning: re.Pattern[bytes]
    # The name of the kind in messages.
    name: str
    # The suffix by which `data pack` counts such files or finds their converter; empty for other kinds.
    suffix: str = ""


# The first match wins. White space before a text, and the case of its letters, do not matter.
KINDS = [
    Kind(re.compile(beginning, re.DOTALL), name, suffix)
    for beginning, name, suffix in (
        (rb"\x28\xb5\x2f\xfd", "Zstandard", ".zst"),
        (rb"BZh", "bzip2", ".bz2"),
        (rb"\xfd7zXZ\0", "xz", ".xz"),
        (rb"\x04\x22\x4d\x18", "LZ4", ""),
        (rb"\x1f\x8b", "gzip", ".gz"),
        (rb"PK\x03\x04", "a zip archive", ".xlsx"),
        (rb"\xd0\xcf\x11\xe0", "a file of an earlier Office", ".xls"),
        (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", ""),
        (rb"Rar!", "a RAR archive", ""),
        (rb"PAR1", "a Parquet table", ""),
        (rb"version https://git-lfs", "a pointer of Git LFS", ""),
        (rb"%PDF", "a PDF", ".pdf"),
        (rb"%!PS", "PostScript", ""),
        (rb"II[*+]\0|MM\0[*+]", "a TIFF", ".tif"),
        (rb"\0\0\x01\0", "an icon", ""),
        (rb"\xff\x0a|\0\0\0\x0cJXL ", "a JPEG XL", ".jxl"),
        (rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", "a JPEG 2000", ".jp2"),
        (rb"8BPS", "a Photoshop file", ".psd"),
        (rb"\xff\xd8\xff", "a damaged JPEG", ""),
        (rb"\x89PNG", "a damaged PNG", ""),
        (rb"GIF8", "a damaged GIF", ""),
        (rb"BM", "a damaged BMP", ""),
        (rb"RIFF", "a damaged WebP, or another RIFF file", ""),
        (rb"....ftyp(avi[fs]|mif1.{0,32}avif)", "an AVIF", ".avif"),
        (rb"....ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", "a HEIC", ".heic"),
        (rb"....ftyp", "a video, or another media file", ""),
        (rb"(?i)\s*(<!--[^>]*-->\s*)?<(!doctype html|html|head|body)", "a web page (HTML)", ".html"),
        (rb"(?i)\s*(<\?xml[^>]*>\s*)?(<!--[^>]*-->\s*)?(<!doctype svg[^>]*>\s*)?<svg", "an SVG", ".svg"),
        (rb"(?i)\s*<\?xml", "XML, such as an SVG or a server's error", ""),
        (rb"\s*[{\[]", "JSON", ""),
    )
]
# Bytes that are compared with the table.
PROBE_BYTES = 1 << 12
# The first bytes that decide whether contents of no known kind are zeros or a text.
MAX_SHOWN = 64


def kind_of(data: bytes) -> Kind | None:
    """The kind of these bytes, by the first of them; None for one that is not in KINDS."""
    start = data[:PROBE_BYTES].removeprefix(b"\xef\xbb\xbf")
    return next((kind for kind in KINDS if kind.beginning.match(start)), None)


def describe_content(data: bytes) -> str:
    """A name for the kind of these bytes, by the first of them; empty for an unknown kind."""
    if kind := kind_of(data):
        return kind.name
    start = data[:MAX_SHOWN]
    if start and not start.strip(b"\0"):
        return "zeros"
    printable = start.isascii() and start.decode("ascii").replace("\n", "").replace("\t", "").isprintable()
    return "text" if start and printable else ""
