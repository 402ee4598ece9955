"""Parquet tables: their virtual shards and rows, read by pyarrow.

A file may come from a stranger: a column unpacks in proportion to its size, and a repeated text is held once.
"""

import importlib.util
import io
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any, BinaryIO

from clipscale.common.errors import UserError
from clipscale.data.shards.access import SourceError, is_local, leaf_of
from clipscale.data.shards.parquet_headers import check_pages, check_schema
from clipscale.data.shards.store import Store

MOST_PARTS = 1 << 22
"""Virtual shards of a table."""
MOST_EXPANSION, FREE_BYTES, MOST_VALUES = 200, 1 << 26, 1 << 27
"""A Parquet column of a row group may unpack to so many times its size, or to so many bytes, and hold so many values."""
Cuts = tuple[list[str], list[tuple[int, int, str]]]
"""Column names, and the first row, end and `where` of each virtual shard."""


def cuts(path: str, rows: int) -> Cuts:
    """Cuts each row group into parts of at most `rows` rows."""
    found: list[tuple[int, int, str]] = []
    before = 0
    with _file(path, Store()) as (file, _):
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if len(found) + size // rows > MOST_PARTS:
                raise ValueError(f"it claims more than {MOST_PARTS} x {rows} rows")
            starts = range(0, size, rows)
            found += [(before + at, before + min(at + rows, size), f"{group}.{at}") for at in starts]
            before += size
        return list(file.schema_arrow.names), found


def named(url: str) -> bool:
    return leaf_of(url).endswith(".parquet")


@contextmanager
def _file(path: str, store: Store) -> Iterator[tuple[Any, "_Pages"]]:
    """A Parquet file, and the check of its pages.

    Texts are read as numbers of their dictionary: a small file can repeat a long text without end.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError("data.train: Parquet tables need the package pyarrow; pip install 'clipscale[parquet]'")
    from pyarrow import ArrowException, parquet

    try:
        with closing(store.open(path).stream) as stream:
            pages = _Pages(stream)
            check_schema(stream, pages.size)
            with parquet.ParquetFile(stream) as file:
                # pyarrow opens local files itself, without a call to Python for each read
                source = path if is_local(path) else pages
                texts = [field.name for field in file.schema_arrow if str(field.type) in ("string", "large_string")]
                with parquet.ParquetFile(source, metadata=file.metadata, read_dictionary=texts) as opened:
                    yield opened, pages
    except (ArrowException, MemoryError) as error:  # some are neither ValueError nor OSError
        raise ValueError(str(error)) from error


class _Pages(io.RawIOBase):
    """A remote Parquet file for pyarrow, whose pages are checked when they are read; those of a local file at once."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._at = stream, 0
        self.size = stream.seek(0, io.SEEK_END)
        self._unchecked: dict[tuple[int, int], int] = {}

    def expect(self, group: Any, *, at_once: bool) -> None:
        """Check the columns of a row group, or have them checked when pyarrow reads them. Raises ValueError."""
        for column in map(group.column, range(group.num_columns)):
            most = max(FREE_BYTES, MOST_EXPANSION * column.total_compressed_size)
            if column.total_uncompressed_size > most or column.num_values > MOST_VALUES:
                raise ValueError(f"column {column.path_in_schema[:80]!r} grows out of proportion when it is unpacked")
            first = column.dictionary_page_offset or column.data_page_offset
            start = min(first, column.data_page_offset)
            end = start + column.total_compressed_size
            if not 0 <= start <= end <= self.size:
                raise ValueError(f"column {column.path_in_schema[:80]!r} lies outside of the file")
            if at_once:
                check_pages(self._stream, start, end, most)
            else:
                self._unchecked[start, end] = most

    def readinto(self, out: Any) -> int:
        """Read from the present place on, at most to the end of a column."""
        count = len(out)
        for (start, end), most in list(self._unchecked.items()):
            if start < self._at + count and self._at < end:
                self._stream.seek(start)
                data = self._stream.read(end - start)
                check_pages(io.BytesIO(data), 0, len(data), most)
                del self._unchecked[start, end]
                if start <= self._at and self._at + count <= end:
                    out[:] = data[self._at - start : self._at - start + count]
                    self._at += count
                    return count
        self._stream.seek(self._at)
        data = self._stream.read(count)
        out[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        self._at = place + (0 if whence == io.SEEK_SET else self._at if whence == io.SEEK_CUR else self.size)
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def rows(store: Store, path: str, where: str, count: int, image: str) -> Iterator[dict[str, Any]]:
    """`count` rows from `where` on, GROUP.ROW; `image` is the column with the pictures. Raises SourceError for damage."""
    group, start = map(int, where.split("."))
    try:
        with _file(path, store) as (file, pages):
            kind = str(file.schema_arrow.field(image).type)
            # a column with pictures instead of paths may have large rows, so they are read one by one
            together = 1 if "binary" in kind or kind.startswith("struct") else 256
            # no threads: only the reading thread may run what a remote file does while it waits
            pages.expect(file.metadata.row_group(group), at_once=is_local(path))
            batches = file.iter_batches(together, row_groups=[group], use_threads=False)
            values = (row for batch in batches for row in zip(*map(plain_values, batch.columns)))
            names = file.schema_arrow.names
            yield from (dict(zip(names, row)) for row in islice(values, start, start + count))
    except (ValueError, KeyError) as error:  # pyarrow's own errors are ValueErrors
        raise SourceError("unreadable_shard", str(error)) from error


def batches(path: str, count: int) -> Iterator[Any]:
    """All rows of a local table, as pyarrow's record batches of at most `count`. Raises ValueError for damage, and OSError."""
    with _file(path, Store()) as (file, pages):
        for group in range(file.num_row_groups):
            pages.expect(file.metadata.row_group(group), at_once=True)
            yield from file.iter_batches(count, row_groups=[group], use_threads=False)


def plain_values(column: Any) -> list[Any]:
    """The values of a column. Of a repeated text there is one object."""
    if not hasattr(column, "dictionary"):
        return list(column.to_pylist())
    numbers = column.indices.to_pylist()
    texts = {number: column.dictionary[number].as_py() for number in set(numbers) - {None}}
    return [texts.get(number) for number in numbers]
