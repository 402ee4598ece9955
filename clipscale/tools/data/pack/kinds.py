"""Recognises files that training does not read as pictures, by their first bytes."""

from clipscale.data.content import kind_of

OTHER_PICTURES = (".tif", ".tiff", ".avif", ".heic", ".heif", ".jxl", ".jp2", ".psd", ".svg")
# The suffixes of pages, which a table may name as pictures.
PAGES = (".html", ".pdf")


def suffix_of(data: bytes) -> str:
    """The suffix of a page or of a picture of another kind, by its first bytes; empty for all else."""
    kind = kind_of(data)
    return kind.suffix if kind and kind.suffix in (*OTHER_PICTURES, *PAGES) else ""
