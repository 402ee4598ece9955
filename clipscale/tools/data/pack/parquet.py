"""Reads the rows of Parquet tables: texts, numbers and lists of them. For a picture a row has its cell, to read later.

A text is read as bytes and decoded here: pyarrow would end the table at the first one that is not UTF-8.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from clipscale.common.errors import UserError
from clipscale.data.shards.subset import parquet_file
from clipscale.tools.data.pack.places import BATCH, Cell
from clipscale.tools.data.pack.separated import Row

if TYPE_CHECKING:
    from pyarrow import DataType, RecordBatch


def unread_columns(file: Path, chosen: Sequence[str]) -> list[str]:
    """The columns that are not read, with their types; none of a table without rows. Raises UserError if one of them
    is chosen.

    `chosen`: the picture's column, then the captions'.
    """
    unread: list[str] = []
    table = parquet_file(file)
    if not table.metadata.num_rows:  # pandas writes its columns as nulls
        return unread
    for field in table.schema_arrow:
        wanted = field.name in chosen
        if not (bytes_type(field.type, wanted) or (field.name == chosen[0] and is_picture(field.type))):
            if wanted:
                raise UserError(
                    f"{file}: column {field.name!r} holds {str(field.type)[:80]}, which is neither texts nor pictures; "
                    "write them to a column of their own"
                )
            unread.append(f"{field.name} ({str(field.type)[:80]})")
    return unread


def bytes_type(column_type: "DataType", wanted: bool = False) -> "DataType | None":
    """The type as which a column is read, with bytes in the place of texts; None if it is not read.

    `wanted`: whether bytes in the column are texts.
    """
    from pyarrow import binary, binary_view, large_binary, large_list, list_, types

    if types.is_dictionary(column_type):
        return bytes_type(column_type.value_type, wanted)
    if types.is_list(column_type) or types.is_large_list(column_type) or types.is_fixed_size_list(column_type):
        inner = bytes_type(column_type.value_type, wanted)
        return inner and (large_list if types.is_large_list(column_type) else list_)(inner)
    if wanted and is_bytes(column_type):
        return column_type
    texts = {types.is_string: binary, types.is_large_string: large_binary, types.is_string_view: binary_view}
    for is_text, as_bytes in texts.items():
        if is_text(column_type):
            return as_bytes()
    is_number = types.is_integer(column_type) or types.is_floating(column_type) or types.is_boolean(column_type)
    return column_type if is_number else None


def is_bytes(column_type: "DataType") -> bool:
    from pyarrow import types

    forms = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    return any(is_form(column_type) for is_form in forms)


def is_picture(column_type: "DataType") -> bool:
    """Whether cells of this type hold pictures: as bytes, or as Hugging Face's struct of bytes and path."""
    from pyarrow import types

    column_type = column_type.value_type if types.is_dictionary(column_type) else column_type
    return is_bytes(column_type) or bool(types.is_struct(column_type))


def parquet_rows(file: Path, chosen: Sequence[str]) -> Iterator[tuple[int, Row]]:
    """The rows. A picture that lies inside is a Cell. `chosen`: the picture's column, then the captions'."""
    table = parquet_file(file)
    types = {field.name: field.type for field in table.schema_arrow}
    image = chosen[0]
    inside = is_picture(types[image])
    read_as = {name: bytes_type(column_type, name in chosen) for name, column_type in types.items()}
    if inside:  # the column's cells are read later
        del read_as[image]
    names = [name for name, as_type in read_as.items() if as_type is not None]
    number = 0
    for group in range(table.num_row_groups):
        batches = table.iter_batches(BATCH, row_groups=[group], columns=names)
        for row, values in enumerate(chain.from_iterable(rows_of_batch(batch, read_as) for batch in batches)):
            yield number, values | ({image: Cell(str(file), group, row, image)} if inside else {})
            number += 1


def rows_of_batch(batch: "RecordBatch", read_as: Mapping[str, "DataType | None"]) -> list[Row]:
    """A batch of rows."""
    columns = [column.cast(read_as[name]).to_pylist() for name, column in zip(batch.schema.names, batch.columns)]
    if not columns:
        return [{}] * batch.num_rows
    return [dict(zip(batch.schema.names, map(decoded, row))) for row in zip(*columns)]


def decoded(value: object) -> object:
    """Turn bytes into texts. Bytes that are not UTF-8 become lone surrogates, as in other tables."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
