"""Reads the headers of a Parquet file's pages, which pyarrow believes: it takes the memory that they claim.

They are in Thrift's compact protocol (github.com/apache/thrift, doc/specs/thrift-compact-protocol.md), and their fields in
github.com/apache/parquet-format, parquet.thrift.
"""

from dataclasses import dataclass
from typing import Any, BinaryIO

HEADER_BYTES = 1 << 16
"""Bytes of a page's header that are read; pyarrow's own bound is 16 MiB. Statistics in it take some hundreds."""
MOST_DEPTH = 64
"""Nested structures and groups of columns."""
MOST_COLUMNS = 1 << 16
_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)
_DICTIONARY = 7
"""Fields of PageHeader: 2 and 3 are its sizes; 5, 7 and 8 are the kinds of pages, whose field 1 counts values."""


@dataclass
class Compact:
    """A reader of Thrift's compact protocol. Every method raises ValueError where the bytes end or are none of it."""

    data: bytes
    at: int = 0

    def byte(self) -> int:
        self.skip(1)
        return self.data[self.at - 1]

    def varint(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise ValueError("a header holds a number of more than 64 bits")

    def integer(self) -> int:
        """A signed integer."""
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):
            raise ValueError("a header ends early")

    def list_head(self) -> tuple[int, int]:
        """Size, and the type of the elements."""
        head = self.byte()
        return (self.varint() if head >> 4 == 15 else head >> 4), head & 15

    def value(self, kind: int, depth: int = 0) -> Any:
        """A value; texts, lists and maps are skipped and give None."""
        if depth > MOST_DEPTH:
            raise ValueError("a header is nested too deeply")
        if kind in (_I16, _I32, _I64):
            return self.integer()
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_BYTE, _DOUBLE, _BINARY):
            self.skip(1 if kind == _BYTE else 8 if kind == _DOUBLE else self.varint())
        elif kind in (_LIST, _SET):
            size, inner = self.list_head()
            self.elements(size, (inner,), depth)
        elif kind == _MAP:
            size = self.varint()
            kinds = self.byte() if size else 0
            self.elements(size, (kinds >> 4, kinds & 15), depth)
        elif kind not in (_TRUE, _FALSE):
            raise ValueError("a header holds an unknown type")
        return None

    def elements(self, size: int, kinds: tuple[int, ...], depth: int) -> None:
        """Those of a list or map: here truth takes a byte."""
        for _ in range(size):
            for kind in kinds:
                self.value(_BYTE if kind in (_TRUE, _FALSE) else kind, depth + 1)

    def struct(self, depth: int = 0, until: int = 1 << 16) -> dict[int, Any]:
        """Fields by number, up to the field `until`, whose value comes next then."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.integer()
            if number == until:
                fields[number] = None
                break
            fields[number] = self.value(head & 15, depth)
        return fields


def check_schema(file: BinaryIO, size: int) -> None:
    """Raise ValueError for a footer with more columns, or more deeply nested ones, than pyarrow's recursion can take."""
    file.seek(max(0, size - 8))
    end = file.read(8)
    length = int.from_bytes(end[:4], "little")
    if end[4:] != b"PAR1" or length > size - 8:
        raise ValueError("it has no footer of Parquet")
    file.seek(size - 8 - length)
    footer = Compact(file.read(min(length, MOST_COLUMNS << 8)))
    if 2 not in footer.struct(until=2):
        raise ValueError("its footer has no columns")
    count, _ = footer.list_head()
    if count > MOST_COLUMNS:
        raise ValueError(f"it has more than {MOST_COLUMNS} columns")
    left: list[int] = []  # the elements that each group still has, depth first
    for _ in range(count):
        children = footer.struct().get(5) or 0
        while left and not left[-1]:
            left.pop()
        if left:
            left[-1] -= 1
        left.append(children)
        if len(left) > MOST_DEPTH:
            raise ValueError("its columns are nested too deeply")


def check_pages(file: BinaryIO, start: int, end: int, most: int) -> None:
    """Raise ValueError for pages, from `start` to `end` in the file, that claim more than `most` bytes or values."""
    unpacked = 0
    while start < end:
        file.seek(start)
        header = Compact(file.read(min(HEADER_BYTES, end - start)))
        fields: dict[int, Any] = header.struct()
        sizes: list[Any] = [fields.get(2, -1), fields.get(3, -1)]
        counts = [part[1] for number in (5, 7, 8) if isinstance(part := fields.get(number), dict) and 1 in part]
        if any(type(value) is not int or value < 0 for value in [*sizes, *counts]):
            raise ValueError("a page has no size")
        unpacked += sizes[0]
        if unpacked > most or max(counts, default=0) > most or (_DICTIONARY in fields and counts[0] > sizes[0]):
            raise ValueError("a page claims more than it can hold")
        start += header.at + sizes[1]
