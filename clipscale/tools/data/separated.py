"""The rows of separated values, as people and programs write them.

A value in quotes may have several lines. But captions also begin with a quote that nothing closes, and a reader that
takes it for the start of such a value takes the rest of the table for its text. Here a quote opens a value of several
lines only if it closes properly before another row begins. Else the line is read by itself.
"""

import csv
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from clipscale.data.sample import IMAGE_TYPES, MAX_TEXT_BYTES

# A value that names a picture, and which of its captions follows (Flickr30k). No column has such a name.
PICTURE = re.compile(rf"(https?://\S+|.*\.({'|'.join(IMAGE_TYPES)}))(#\d+)?", re.I)
# A row of a table: values by column, of any type, since strangers write them.
Row = dict[str, object]
# Most lines of a value. Looking for the end of a quote takes as long for each line that opens one.
MAX_LINES = 200
# Lines in which a table shows how it names pictures.
FIRST_LINES = 100


class Lines:
    """Lines with their numbers. Some may be put back, to be read again."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)
        self._again: deque[str] = deque()
        # Number of the line that was read last.
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else next(self._lines)
        self.number += 1
        return line

    def until(self, is_end: Callable[[str], bool], passed: list[str]) -> Iterator[str]:
        """The following lines, at most MAX_LINES, up to the first that `is_end` accepts; `passed` gets them, too."""
        for line in self:
            passed.append(line)
            yield line
            if is_end(line) or len(passed) == MAX_LINES:
                return

    def put_back(self, lines: list[str]) -> None:
        self._again.extendleft(reversed(lines))
        self.number -= len(lines)


def quoted(lines: Iterable[str], separator: str) -> list[str] | None:
    """The values of the row that these lines begin with, by the rules of quotes; None if they are broken."""
    try:
        return [value.strip() for value in next(csv.reader(lines, delimiter=separator, strict=True), [])]
    except csv.Error:
        return None


def literal(line: str, separator: str) -> list[str]:
    """The values of a line in which quotes are letters, except those around a whole value."""
    values = [value.strip() for value in line.split(separator)]
    if '"' not in line:
        return values
    return [value[1:-1] if re.fullmatch('"[^"]*"', value) else value for value in values]


def tolerant(line: str, separator: str) -> list[str]:
    """The values of a line with quotes at wrong places; none if one is open at its end."""
    try:
        values = next(csv.reader([line.rstrip("\r\n") + "\n"], delimiter=separator), [])
    except csv.Error:  # a value over the limit
        return []
    return [] if any(value.endswith("\n") for value in values) else [value.strip() for value in values]


def header_values(line: str, separator: str) -> list[str]:
    csv.field_size_limit(MAX_TEXT_BYTES)
    return quoted([line], separator) or literal(line, separator)


class Separated:
    """How a table is written: its separator, the names of its columns, and which of them is the picture's."""

    def __init__(self, separator: str, names: list[str], image: str) -> None:
        self.separator = separator
        self.names = names
        self.image = names.index(image)
        # Whether names in the table's first lines end as names of pictures do. Then other values name no picture.
        self.suffixed = False

    def rows(self, lines: Iterable[str]) -> Iterator[tuple[int, Row | None]]:
        """The number of each row's first line, and its values by name; None for a row that has not as many."""
        csv.field_size_limit(MAX_TEXT_BYTES)
        source = Lines(lines)
        first = [*islice(source, FIRST_LINES)]
        source.put_back(first)
        self.suffixed = any(PICTURE.fullmatch(value) for line in first for value in literal(line, self.separator))
        for line in source:
            number = source.number
            values = quoted([line], self.separator) if '"' in line else literal(line, self.separator)
            if values is None:
                values = self.repaired(line, source)
            if any(values):
                yield number, dict(zip(self.names, values)) if self.fits(values) else None

    def repaired(self, line: str, source: Lines) -> list[str]:
        """The values of a row with broken quotes, which may go on in the next lines.

        There are fewer values than names, or more, if the row cannot be understood.
        """
        more: list[str] = []
        values = quoted(chain([line], source.until(self.is_row, more)), self.separator)
        swallows = self.is_row(line) and any(map(self.is_row, more[-1:]))
        if values is not None and self.fits(values) and not swallows:
            return values
        source.put_back(more)
        alone = literal(line, self.separator)
        return alone if self.fits(alone) else tolerant(line, self.separator) or [line]

    def fits(self, values: list[str]) -> bool:
        """Whether there is a value for each name."""
        more = values[len(self.names) :]
        good = len(values) >= len(self.names) and not any(more) and "\0" not in "".join(values)
        return good and max(map(len, values)) <= MAX_TEXT_BYTES

    def is_row(self, line: str) -> bool:
        """Whether a line alone is a row with a picture, if quotes are letters."""
        values = literal(line, self.separator)
        names_picture = PICTURE.fullmatch if self.suffixed else bool
        return self.fits(values) and bool(names_picture(values[self.image]))
