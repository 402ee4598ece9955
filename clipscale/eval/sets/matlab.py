"""Reads MATLAB's files of version 5 (.mat): numbers, text, structures and cells, as SVHN, Oxford Flowers and Stanford Cars have them.

The format: "MAT-File Format", MathWorks 2019. scipy's reader follows nested values as deep as a file says, and unpacks as much.
"""

import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

import numpy as np

from clipscale.data.shards.tar import FREE_BYTES, MOST_EXPANSION

_TYPES = {
    1: "i1",
    2: "u1",
    3: "i2",
    4: "u2",
    5: "i4",
    6: "u4",
    7: "f4",
    9: "f8",
    12: "i8",
    13: "u8",
    16: "u1",
    17: "u2",
}
_MATRIX, _PACKED = 14, 15
_CELL, _STRUCT, _CHAR = 1, 2, 4
MOST_BYTES = 1 << 29
"""A file unpacks to so many. SVHN's test set has 8e7."""
DEEPEST = 3
"""Values within values: a text in a structure in an array."""
MOST_VALUES = 1 << 18
"""Variables, cells, and fields of structures, of a file. Stanford Cars' has 5e4."""
MOST_LETTERS = 1 << 24
"""Of a file's names and texts. Stanford Cars' has 1e6."""
MOST_DIMENSIONS = 32


class _File:
    def __init__(self, data: bytes) -> None:
        self.order: Literal["<", ">"] = "<" if data[126:128] == b"IM" else ">"
        if len(data) < 128 or data[126:128] not in (b"IM", b"MI"):
            raise ValueError("no MATLAB file of version 5")
        self.left = min(MOST_BYTES, FREE_BYTES + MOST_EXPANSION * len(data))
        self.values, self.letters = MOST_VALUES, MOST_LETTERS

    def elements(self, data: bytes | memoryview, at: int = 0) -> Iterator[tuple[int, memoryview]]:
        """Type and content of each element. Raises ValueError."""
        view = memoryview(data)
        while at + 8 <= len(view):
            kind, size = struct.unpack(f"{self.order}II", view[at : at + 8])
            if kind >> 16:  # up to four bytes, in the tag itself
                kind, size, start, at = kind & 0xFFFF, kind >> 16, at + 4, at + 8
                if size > 4:
                    raise ValueError("a short element of more than four bytes")
            else:
                start, at = at + 8, at + 8 + size
                at += 0 if kind == _PACKED else -size % 8
            if start + size > len(view):
                raise ValueError("it ends within an element")
            yield kind, view[start : start + size]

    def unpacked(self, data: memoryview) -> bytes:
        """Raises ValueError, and zlib.error."""
        decoder = zlib.decompressobj()
        content = decoder.decompress(data, self.left)
        self.left -= len(content)
        if not decoder.eof or not self.left:
            raise ValueError("it is cut off, or unpacks to too many bytes")
        return content

    def numbers(self, kind: int, data: memoryview) -> np.ndarray:
        if kind not in _TYPES:
            raise ValueError(f"elements of type {kind}")
        return np.frombuffer(data, np.dtype(_TYPES[kind]).newbyteorder(self.order))

    def text(self, data: memoryview, width: int = 1) -> str:
        """Text of letters of one or two bytes. Raises ValueError."""
        self.letters -= len(data)
        if width > 2 or self.letters < 0:
            raise ValueError(f"a text of other letters, or texts of more than {MOST_LETTERS}")
        return bytes(data).decode("latin-1" if width == 1 else f"utf-16-{'le' if self.order == '<' else 'be'}")

    def count(self, values: int) -> None:
        self.values -= values
        if self.values < 0:
            raise ValueError(f"it has more than {MOST_VALUES} values")

    def matrix(self, type_: int, data: memoryview, depth: int = 0) -> tuple[str, Any]:
        """Name and value: an array, a text, a list of cells, or of an array of structures a list of dicts. Raises ValueError."""
        if type_ != _MATRIX or depth > DEEPEST:
            raise ValueError("a cell or field is no value, or values are nested too deeply")
        self.count(1)
        if not data:
            return "", np.empty(0)
        parts = self.elements(data)
        try:
            kind = int(self.numbers(*next(parts))[0]) & 0xFF
            sizes = self.numbers(*next(parts))
            if len(sizes) > MOST_DIMENSIONS:
                raise ValueError(f"an array of more than {MOST_DIMENSIONS} dimensions")
            shape = sizes.tolist()
            name = self.text(next(parts)[1])
            fields = [""]
            if kind == _STRUCT:
                longest = max(1, int(self.numbers(*next(parts))[0]))
                text = self.text(next(parts)[1])
                self.count(-(-len(text) // longest))
                fields = [text[i : i + longest].rstrip("\0") for i in range(0, len(text), longest)] or fields
            if kind in (_CELL, _STRUCT):
                cells = [self.matrix(*part, depth + 1)[1] for part in parts]
                if kind == _CELL:
                    return name, cells
                width = len(fields)
                return name, [dict(zip(fields, cells[i : i + width])) for i in range(0, len(cells), width)]
            content_type, content = next(parts)
            values = self.numbers(content_type, content)
        except StopIteration:
            raise ValueError("a value has too few elements") from None
        if kind == _CHAR:
            return name, self.text(content, values.itemsize if values.dtype.kind == "u" else 8)
        return name, values.reshape(shape, order="F")


def variables(data: bytes) -> dict[str, Any]:
    """The variables of a file, by name. Raises ValueError for any other file, and for one that grows when it is read."""
    file = _File(data)
    found = {}
    try:
        for kind, content in file.elements(data, 128):
            if kind == _PACKED:
                inner = list(islice(file.elements(file.unpacked(content)), 2))
                kind, content = inner[0] if len(inner) == 1 else (0, content)
            if kind == _MATRIX:
                name, value = file.matrix(kind, content)
                found[name] = value
    except (zlib.error, IndexError) as error:
        raise ValueError(str(error)) from error
    return found
