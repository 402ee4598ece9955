"""Says what a file or a picture is by its first bytes, for messages about those that cannot be read."""

# First bytes -> what begins with them.
FIRST_BYTES = {
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x04\x22\x4d\x18": "LZ4",
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"PAR1": "a Parquet table",
    b"version https://git-lfs": "a pointer of Git LFS",
    b"%PDF": "a PDF",
    b"%!PS": "PostScript",
    b"II*\0": "a TIFF",
    b"MM\0*": "a TIFF",
    b"\0\0\1\0": "an icon",
    b"\xff\x0a": "a JPEG XL",
    b"\0\0\0\x0cJXL ": "a JPEG XL",
    b"\xff\xd8\xff": "a damaged JPEG",
    b"\x89PNG": "a damaged PNG",
    b"GIF8": "a damaged GIF",
    b"BM": "a damaged BMP",
    b"RIFF": "a damaged WebP, or another RIFF file",
}
# First letters of a text in lower case, after white space and a byte order mark -> what begins with them.
TEXTS = {
    b"<!doctype html": "a web page (HTML)",
    b"<html": "a web page (HTML)",
    b"<head": "a web page (HTML)",
    b"<svg": "an SVG",
    b"<?xml": "XML, such as an SVG or a server's error",
    b"{": "JSON",
    b"[": "JSON",
}
# Brands of ISO's media files.
BRANDS = {b"avif": "an AVIF", b"avis": "an AVIF", b"heic": "a HEIC", b"heix": "a HEIC", b"mif1": "a HEIF"}
# Bytes that are looked at.
PROBE_BYTES = 64


def describe_content(data: bytes) -> str:
    """A name for the kind of these bytes, by the first of them; empty for an unknown kind."""
    start = data[:PROBE_BYTES]
    if start[4:8] == b"ftyp":
        return BRANDS.get(start[8:12], "a video, or another media file")
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for table, head in ((FIRST_BYTES, start), (TEXTS, text)):
        for first, name in table.items():
            if head.startswith(first):
                return name
    if start and not start.strip(b"\0"):
        return "zeros"
    printable = start.isascii() and start.decode("ascii").replace("\n", "").replace("\t", "").isprintable()
    return "text" if start and printable else ""
