"""Pairs of pictures and captions as people have them: tables, folders of pictures, caption files."""

import csv
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

from clipscale.common.errors import UserError, first_line
from clipscale.common.record import Record
from clipscale.data.decode import IMAGE_TYPES
from clipscale.data.sample import MAX_IMAGE_BYTES, MAX_TEXT_BYTES, BrokenSampleError
from clipscale.data.shards.addresses import is_local

USUAL = ("image", "filepath", "file_name"), ("caption", "captions", "text", "title")
"""Names of a table's columns: the picture's and the captions'."""
TABLES = (".csv", ".tsv", ".jsonl", ".parquet")


class Cell(NamedTuple):
    """The place of a picture inside a Parquet file."""

    file: str
    group: int
    """The row group."""
    row: int
    """The row in it."""
    column: str


class Pair(NamedTuple):
    """A picture that is not read yet, and its captions."""

    name: str
    """What the source calls the picture. Pairs of one name are of one picture."""
    place: str | Cell
    """A path, an address, or a cell."""
    captions: list[str]
    fields: Record
    """The other columns: texts, numbers and lists, such as hard negatives."""


def pairs_of(source: str, columns: list[str] | None) -> Iterator[Pair]:
    """The pairs of a table (CSV, TSV, JSON lines, Parquet), a caption file of COCO, or a folder: with metadata.jsonl
    (Hugging Face's imagefolder), with Parquet files, or with a .txt beside each picture.

    `columns`: the picture's, then those of captions; None: the usual names. Raises UserError.
    """
    path = Path(source).expanduser()
    metadata = path / "metadata.jsonl"
    if path.is_dir():
        tables = [metadata] if metadata.is_file() else sorted(path.rglob("*.parquet"))
    elif path.suffix in TABLES:
        tables = [path]
    elif path.suffix == ".json":
        return of_coco(path)
    else:
        raise UserError(f"{source}: give a folder, a table ({', '.join(TABLES)}) or COCO's captions (.json)")
    return (pair for table in tables for pair in of_table(table, columns)) if tables else of_folder(path)


def of_folder(folder: Path) -> Iterator[Pair]:
    """The pictures of a folder and those below it, with the texts beside them."""
    for path in sorted(folder.rglob("*")):
        if path.suffix[1:].lower() in IMAGE_TYPES:
            text = path.with_suffix(".txt")
            captions = [text.read_text(encoding="utf-8", errors="replace")] if text.is_file() else []
            yield Pair(str(path.relative_to(folder)), str(path), captions, {})


def of_coco(file: Path) -> Iterator[Pair]:
    """COCO's caption annotations, or Karpathy's test split, with the pictures in a folder beside the file."""
    from clipscale.eval.sets import captions  # here: it loads torch

    loaded = captions.load(file)
    for image, texts in zip(loaded.images, loaded.answers):
        yield Pair(image.path.name, str(image.path), [*texts], {})


def of_table(file: Path, columns: list[str] | None) -> Iterator[Pair]:
    """The pairs of a table's rows. Paths are relative to its folder."""
    rows = parquet_rows(file, columns) if file.suffix == ".parquet" else text_rows(file)
    chosen: list[str] = []
    try:
        for number, row in enumerate(rows):
            chosen = chosen or chosen_columns(file, row, columns)
            image, *texts = chosen
            values = [item for name in texts for item in (row[name] if isinstance(row[name], list) else [row[name]])]
            captions = [item for item in values if isinstance(item, str)]
            fields = {k: v for k, v in row.items() if k not in chosen and isinstance(v, str | int | float | list)}
            place = row[image] or ""
            if isinstance(place, Cell):
                yield Pair(f"{file.name}:{number}", place, captions, fields)
            else:
                path = str(file.parent / place) if is_local(place) else place
                yield Pair(place, path, captions, fields)
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise UserError(f"{file}: row {len(chosen) and number + 1} cannot be read ({first_line(error)})") from error


def text_rows(file: Path) -> Iterator[Record]:
    with file.open(encoding="utf-8-sig", newline="") as text:
        if file.suffix == ".jsonl":
            yield from (json.loads(line) for line in text if line.strip())
            return
        csv.field_size_limit(MAX_TEXT_BYTES)
        yield from csv.DictReader(text, delimiter="\t" if file.suffix == ".tsv" else ",")


def parquet_rows(file: Path, columns: list[str] | None) -> Iterator[Record]:
    """Pictures inside are not read: a row has their cell. Raises UserError where pyarrow is not installed."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError("Parquet needs pyarrow: pip install 'clipscale[parquet]'") from error
    table = ParquetFile(file)
    names = table.schema_arrow.names
    image = chosen_columns(file, dict.fromkeys(names), columns)[0]
    inside = "string" not in str(table.schema_arrow.field(image).type).partition("<")[0]
    read = [name for name in names if not (inside and name == image)]
    for group in range(table.num_row_groups):
        for number, row in enumerate(table.read_row_group(group, columns=read).to_pylist()):
            yield row | {image: Cell(str(file), group, number, image)} if inside else row


def chosen_columns(file: Path, row: Record, columns: list[str] | None) -> list[str]:
    """The picture's column and the captions'. Raises UserError for those that are not there."""
    chosen = columns or [next((name for name in usual if name in row), usual[0]) for usual in USUAL]
    for name in chosen:
        if name not in row:
            given = ", ".join(map(str, row))
            raise UserError(f"{file.name} has no column {name!r}; it has {given}: give columns=[IMAGE,CAPTION]")
    return chosen


def read_picture(place: str | Cell) -> bytes:
    """The bytes at a place. Raises BrokenSampleError `unreadable_file`, `no_image`, `too_large`."""
    try:
        if isinstance(place, Cell):
            value = row_group(*place[:2], place.column)[place.row].as_py()
            data = value.get("bytes") if isinstance(value, dict) else value  # Hugging Face's struct of bytes and path
        elif is_local(place) and not Path(place).is_file():
            raise FileNotFoundError(f"{place}: no such file")
        else:
            # Whole: not all servers of pictures answer ranges of bytes.
            options = {"block_size": 0} if place.startswith("http") else {}
            with fsspec.open(place, "rb", **options) as source:
                data = source.read(MAX_IMAGE_BYTES + 1)
    except Exception as error:  # of many kinds, by the scheme
        raise BrokenSampleError("unreadable_file", str(error)) from error
    if not isinstance(data, bytes):
        raise BrokenSampleError("no_image")
    if len(data) > MAX_IMAGE_BYTES:
        raise BrokenSampleError("too_large")
    return data


@lru_cache(maxsize=2)
def row_group(file: str, group: int, column: str) -> Any:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(file).read_row_group(group, columns=[column])[column]
