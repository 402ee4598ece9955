"""Reads the lines of a table that is a text, in any encoding that its bytes show."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.data.sample import MAX_TEXT_BYTES

# The first bytes of a table, which show its encoding.
START = 1 << 20
# Most characters of a line. What follows counts as another line.
MAX_LINE_LENGTH = 4 * MAX_TEXT_BYTES


def lines_of(file: Path) -> Iterator[str]:
    """A text's lines, decoded by `files.encoding_of`. Wrong bytes become lone surrogates.

    Raises UserError for another encoding, that is, if most of the first lines with letters beyond ASCII are not UTF-8.
    """
    with file.open("rb") as raw:
        start = raw.read(START)
    encoding = files.encoding_of(start)
    if encoding == "utf-8":
        lines = start.splitlines()[: -1 if len(start) == START else None]
        wrong = [number for number, line in enumerate(lines, 1) if line.decode("utf-8", "ignore").encode() != line]
        if 1 < len(wrong) > sum(not line.isascii() for line in lines) / 2:
            raise UserError(
                f"{file}: line {wrong[0]} is not UTF-8, and no byte order mark says what it is; convert the table: "
                "iconv -f CP1252 -t UTF-8 OLD > NEW"
            )
    errors = "surrogateescape" if encoding.startswith("utf-8") else "surrogatepass"
    with file.open(encoding=encoding, errors=errors, newline="") as text:
        rest = iter(partial(text.readline, MAX_LINE_LENGTH), "")
        first = next(rest, "")
        names_separator = re.fullmatch(r"\ufeff?sep=.\s*", first)  # Excel's
        if not names_separator:
            yield first
        yield from rest
