"""Reads the rows of separated values, as people and programs write them.

A value in quotes may have several lines. But captions may also begin with a quote that nothing closes. A reader that
takes it for the start of a value reads the rest of the table as that value. Here a quote opens a value of several lines
only if it closes properly before another row begins. Otherwise the line is read alone.
"""

import csv
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from clipscale.data.sample import IMAGE_TYPES, MAX_TEXT_BYTES

# A value that names a picture. `#N` says which of its captions follows (Flickr30k). No column has such a name.
PICTURE = re.compile(rf"(https?://\S+|.*\.({'|'.join(IMAGE_TYPES)}))(#\d+)?", re.I)
# A row of a table: values by column, of any type, since strangers write them.
Row = dict[str, object]
# Most lines of a value. The reader may look this many lines ahead for each line that opens a quote.
MAX_LINES = 200
# The number of first lines that show how a table names pictures.
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

    def take_until(self, is_end: Callable[[str], bool]) -> list[str]:
        """The following lines, at most MAX_LINES, up to the first that `is_end` accepts, with that one."""
        taken: list[str] = []
        for line in self:
            taken.append(line)
            if is_end(line) or len(taken) == MAX_LINES:
                break
        return taken

    def put_back(self, lines: list[str]) -> None:
        """Read these lines again, as the next ones."""
        self._again.extendleft(reversed(lines))
        self.number -= len(lines)


class QuotedRow(NamedTuple):
    """A row by the rules of quotes."""

    values: list[str]
    # The number of its lines: several if a value in quotes has several.
    num_lines: int


def parse_quoted(lines: Iterable[str], separator: str, escape: str | None = None) -> QuotedRow | None:
    """The row that these lines begin with, by the rules of quotes; None if they are broken.

    `escape`: the character that makes the quote after it an ordinary character.
    """
    reader = csv.reader(lines, delimiter=separator, escapechar=escape, strict=True)
    try:
        values = next(reader, [])
    except csv.Error:
        return None
    return QuotedRow([value.strip() for value in values], reader.line_num)


def parse_unquoted(line: str, separator: str) -> list[str]:
    """The values of a line in which quotes are ordinary characters. Only quotes around a whole value are removed."""
    values = [value.strip() for value in line.split(separator)]
    if '"' not in line:
        return values
    return [value[1:-1] if re.fullmatch('"[^"]*"', value) else value for value in values]


def parse_tolerantly(line: str, separator: str) -> list[str]:
    """The values of a line with quotes at wrong places; none if a quote is still open at its end."""
    try:
        values = next(csv.reader([line.rstrip("\r\n") + "\n"], delimiter=separator), [])
    except csv.Error:  # a value over the limit
        return []
    return [] if any(value.endswith("\n") for value in values) else [value.strip() for value in values]


def header_values(line: str, separator: str) -> list[str]:
    """The values of a table's first line. Sets the limit of csv for a value."""
    csv.field_size_limit(MAX_TEXT_BYTES)
    row = parse_quoted([line], separator)
    return row.values if row and row.values else parse_unquoted(line, separator)


class Separated:
    """The form of a table: its separator, the names of its columns, and which of them is the picture's."""

    def __init__(self, separator: str, names: list[str], image: str) -> None:
        self.separator = separator
        self.names = names
        self.image = names.index(image)
        # Whether the table's first lines name pictures with a picture's suffix. Then other values name no picture.
        self.has_suffixes = False
        # Number of the first row with quotes that a backslash escapes, as Spark and MySQL write them. 0: none yet.
        self.escaped_at = 0

    def rows(self, lines: Iterable[str]) -> Iterator[tuple[int, Row | None]]:
        """The number of each row's first line, and its values by name; None if it has another number of values."""
        csv.field_size_limit(MAX_TEXT_BYTES)
        source = Lines(lines)
        first = [*islice(source, FIRST_LINES)]
        source.put_back(first)
        self.has_suffixes = any(
            PICTURE.fullmatch(value) for line in first for value in parse_unquoted(line, self.separator)
        )
        for line in source:
            number = source.number
            values = self.values_of(line, source)
            if any(values):
                yield number, dict(zip(self.names, values)) if self.fits(values) else None

    def values_of(self, line: str, source: Lines) -> list[str]:
        """The values of the row that the line begins; takes its other lines from the source.

        If the row cannot be understood, there are fewer or more values than names.
        """
        if '"' not in line:
            return parse_unquoted(line, self.separator)
        row = parse_quoted([line], self.separator) or self.row_of_several_lines(line, source)
        if not self.escaped_at and not (row and self.fits(row.values)) and self.has_escaped_quotes(line):
            self.escaped_at = source.number
        if row:
            return row.values
        alone = parse_unquoted(line, self.separator)
        return alone if self.fits(alone) else parse_tolerantly(line, self.separator) or [line]

    def row_of_several_lines(self, line: str, source: Lines) -> QuotedRow | None:
        """The row of a line with an open quote and of the next lines, which are taken from the source.

        None, and no line is taken, if the quote does not close before another row begins.
        """
        following = source.take_until(self.is_row)
        row = parse_quoted([line, *following], self.separator)
        if row and self.fits(row.values):
            last = following[row.num_lines - 2]
            swallows_a_row = self.is_row(line) and self.is_row(last)
            if not swallows_a_row:
                source.put_back(following[row.num_lines - 1 :])
                return row
        source.put_back(following)
        return None

    def has_escaped_quotes(self, line: str) -> bool:
        """Whether a line, which is no row as it stands, is one if a backslash before a quote makes it a letter."""
        row = parse_quoted([line], self.separator, escape="\\") if '\\"' in line else None
        return row is not None and self.fits(row.values)

    def fits(self, values: list[str]) -> bool:
        """Whether there is a value for each name."""
        more = values[len(self.names) :]
        good = len(values) >= len(self.names) and not any(more) and "\0" not in "".join(values)
        return good and max(map(len, values)) <= MAX_TEXT_BYTES

    def is_row(self, line: str) -> bool:
        """Whether a line alone is a row with a picture, if quotes are letters."""
        values = parse_unquoted(line, self.separator)
        names_picture = PICTURE.fullmatch if self.has_suffixes else bool
        return self.fits(values) and bool(names_picture(values[self.image]))
