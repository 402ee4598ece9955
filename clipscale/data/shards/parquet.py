"""Parquet tables: their virtual shards and rows, read by pyarrow.

A file may come from a stranger: a column unpacks in proportion to its size, and a repeated text is held once.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any

from clipscale.data.shards.access import SourceError, is_local, leaf_of
from clipscale.data.shards.store import Store
from clipscale.errors import UserError

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
    with _file(path, Store()) as file:
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if len(found) + size // rows > MOST_PARTS:
                raise ValueError(f"it claims more than {MOST_PARTS} x {rows} rows")
            found += [
                (before + start, before + min(start + rows, size), f"{group}.{start}") for start in range(0, size, rows)
            ]
            before += size
        return list(file.schema_arrow.names), found


def named(url: str) -> bool:
    return leaf_of(url).endswith(".parquet")


@contextmanager
def _file(path: str, store: Store) -> Iterator[Any]:
    """A Parquet file. Texts are read as numbers of their dictionary: a small file can repeat a long text without end."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError("data.train: Parquet tables need the package pyarrow; pip install 'clipscale[parquet]'")
    from pyarrow import parquet

    with closing(store.open(path).stream) as stream, parquet.ParquetFile(stream) as file:
        # pyarrow opens local files itself, without a call to Python for each read
        source = path if is_local(path) else stream
        texts = [field.name for field in file.schema_arrow if str(field.type) in ("string", "large_string")]
        with parquet.ParquetFile(source, metadata=file.metadata, read_dictionary=texts) as opened:
            yield opened


def rows(store: Store, path: str, where: str, count: int, image: str) -> Iterator[dict[str, Any]]:
    """`count` rows from `where` on, GROUP.ROW; `image` is the column with the pictures. Raises SourceError for damage."""
    group, start = map(int, where.split("."))
    try:
        with _file(path, store) as file:
            kind = str(file.schema_arrow.field(image).type)
            # a column with pictures instead of paths may have large rows, so they are read one by one
            together = 1 if "binary" in kind or kind.startswith("struct") else 256
            # no threads: only the reading thread may run what a remote file does while it waits
            _check_sizes(file.metadata.row_group(group))
            batches = file.iter_batches(together, row_groups=[group], use_threads=False)
            found = (row for batch in batches for row in _plain_rows(batch))
            yield from islice(found, start, start + count)
    except (ValueError, KeyError) as error:  # pyarrow's own errors are ValueErrors
        raise SourceError("unreadable_shard", str(error)) from error


def _check_sizes(group: Any) -> None:
    """Raise ValueError for a row group with a column that grows out of proportion."""
    for column in map(group.column, range(group.num_columns)):
        most = max(FREE_BYTES, MOST_EXPANSION * column.total_compressed_size)
        if column.total_uncompressed_size > most or column.num_values > MOST_VALUES:
            raise ValueError(f"column {column.path_in_schema[:80]!r} grows out of proportion when it is unpacked")


def _plain_rows(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a batch. Those with the same text share it."""
    values = [_plain_values(column) for column in batch.columns]
    return (dict(zip(batch.schema.names, row)) for row in zip(*values))


def _plain_values(column: Any) -> list[Any]:
    if not hasattr(column, "dictionary"):
        return list(column.to_pylist())
    numbers = column.indices.to_pylist()
    texts = {number: column.dictionary[number].as_py() for number in set(numbers) - {None}}
    return [texts.get(number) for number in numbers]
