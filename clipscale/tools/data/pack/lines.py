"""The lines of a table that is a text, in any encoding that shows itself."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.data.captions import encoding_of
from clipscale.data.sample import MAX_TEXT_BYTES

# Bytes in which a table shows its encoding.
START = 1 << 20
# Characters of a line; what follows is another one.
MAX_LINE_LENGTH = 4 * MAX_TEXT_BYTES


def lines_of(file: Path) -> Iterator[str]:
    """A text's lines, decoded by its byte order mark, or else as UTF-8, where wrong bytes become lone surrogates.

    Raises UserError for another encoding: most of the first lines with letters beyond ASCII are not UTF-8.
    """
    with file.open("rb") as raw:
        start = raw.read(START)
    encoding = encoding_of(start)
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
