"""Reads the pictures that a source's pairs name: files below a root, addresses, cells of a Parquet file.

A table may come from strangers. So links in paths are followed, and the file must really lie below the root. Addresses
are fetched only from the web, or if they begin with the root.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

from clipscale.common.errors import UserError
from clipscale.data.sample import MAX_IMAGE_BYTES, MAX_NAME_BYTES, BrokenSampleError
from clipscale.data.shards.requests import first_bytes
from clipscale.data.shards.subset import parquet_file
from clipscale.tools.data.pack.separated import PICTURE

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
WEB = ("http://", "https://")
# Rows of a Parquet file that are in memory at once.
BATCH = 64


class Place(NamedTuple):
    """A path or an address, as a source names it."""

    name: str
    # A path is relative to this folder, or else to the root.
    folder: str
    # A folder without links, or the beginning of addresses.
    root: str


class Cell(NamedTuple):
    """A picture inside a Parquet file."""

    file: str
    # The row group.
    group: int
    # The row in the row group.
    row: int
    column: str
    # A path in the cell is relative to this place.
    base: Place | None = None


def read(place: Place | Cell, most: int = MAX_IMAGE_BYTES) -> bytes:
    """The bytes at a place. Raises BrokenSampleError `unreadable_file`, `windows_path`, `outside_root`, `no_image`,
    `too_large`."""
    try:
        data = cell_bytes(place, most + 1) if isinstance(place, Cell) else bytes_at(place, most + 1)
    except BrokenSampleError:
        raise
    except Exception as error:  # each scheme's library raises exceptions of its own
        raise BrokenSampleError("unreadable_file", str(error)) from error
    if not isinstance(data, bytes):
        raise BrokenSampleError("no_image")
    if len(data) > most:
        raise BrokenSampleError("too_large")
    return data


def bytes_at(place: Place, most: int) -> bytes:
    name = place.name.removeprefix("file://")
    if not ADDRESS.match(name):
        with local_file(place._replace(name=name)).open("rb") as file:
            return file.read(most)
    # fsspec reads `a::b` as an address inside of another one
    if not name.startswith((*WEB, place.root)) or "::" in name or "/../" in name:
        raise BrokenSampleError("outside_root", name)
    if name.startswith(WEB):
        return first_bytes(name, most, secrets=name.startswith(place.root))
    with fsspec.open(name, "rb") as source:
        return bytes(source.read(most))


def local_file(place: Place) -> Path:
    """The file that a path names, without links. Raises BrokenSampleError."""
    spelt = (place.name, place.name.replace("\\", "/"))
    for path in (Path(base, name) for name in spelt for base in (place.folder, place.root)):
        if path.is_file():
            file = path.resolve()
            if not file.is_relative_to(place.root):
                raise BrokenSampleError("outside_root", str(file))
            return file
    raise BrokenSampleError("windows_path" if "\\" in place.name else "unreadable_file", "no such file")


def resolved_root(root: str) -> str:
    """A root without links; addresses end with a slash. Raises UserError."""
    if ADDRESS.match(root):
        return f"{root.rstrip('/')}/"
    folder = Path(root).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"root={root}: is not a folder; give the one below which the pictures lie")
    return str(folder)


def cell_bytes(cell: Cell, most: int) -> object:
    """The picture in a cell, or at the path that the cell holds."""
    column = read_column(cell.file, cell.group, cell.column)
    if cell.row < column.first:
        read_column.cache_clear()
        column = read_column(cell.file, cell.group, cell.column)
    value = column.cell(cell.row).as_py()
    if isinstance(value, dict):  # Hugging Face's
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes) and len(value) <= MAX_NAME_BYTES:  # a path, written by what knows no type of texts
        text = value.decode("utf-8", "replace").strip()
        value = text if PICTURE.fullmatch(text) else value
    return bytes_at(cell.base._replace(name=value), most) if cell.base and isinstance(value, str) else value


class Column:
    """The cells of a column in a row group, a batch at a time: a group may decode to more than the memory."""

    def __init__(self, batches: Iterator[Any]) -> None:
        """`batches`: the column's cells, batch by batch."""
        self.batches = batches
        self.cells: Sequence[Any] = ()
        # The row of the first cell in memory.
        self.first = 0

    def cell(self, row: int) -> Any:
        """The cell of a row, which is not before the first in memory."""
        while row >= self.first + len(self.cells):
            cells = next(self.batches)  # raises for a damaged page, and at each later call
            self.first += len(self.cells)
            self.cells = cells
        return self.cells[row - self.first]


@lru_cache(maxsize=1)  # rows come in their order
def read_column(file: str, group: int, name: str) -> Column:
    """The column of this name in a row group; the last if there are several."""
    batches = parquet_file(file).iter_batches(BATCH, row_groups=[group], columns=[name], use_threads=False)
    return Column(batch.columns[-1] for batch in batches)
