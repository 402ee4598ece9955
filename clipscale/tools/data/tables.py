"""The rows of tables as people have them: separated values of any separator, JSON lines, a list in JSON, Parquet.

A row is its number and its values by column, or None where it cannot be used: one bad row is one pair.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.record import Record
from clipscale.data.decode import encoding_of, json_fields
from clipscale.data.sample import MAX_TEXT_BYTES, BrokenSampleError
from clipscale.data.shards.subset import parquet_file
from clipscale.tools.data.parquet import parquet_rows, unread_columns
from clipscale.tools.data.separated import PICTURE, Separated, header_values

# Names of the column of pictures and of that of captions.
USUAL: dict[str, list[str]] = files.read_yaml(Path(__file__).with_name("columns.yaml"))
SEPARATED = (".csv", ".tsv", ".tab", ".txt", ".token")
TABLES = (*SEPARATED, ".jsonl", ".ndjson", ".json", ".parquet")
SEPARATORS = "\t,;|"
# Bytes in which a table shows its encoding.
START = 1 << 20
# Rows whose keys are the columns of JSON.
FIRST_ROWS = 100
# Columns that a message names.
MOST_NAMES = 20
# Characters of a line; what follows is another one.
LONGEST_LINE = 4 * MAX_TEXT_BYTES
Rows = Iterator[tuple[int, Record | None]]


class Table(NamedTuple):
    file: Path
    # The picture's, and those of captions.
    columns: list[str]
    rows: Callable[[], Rows]
    # The column whose values stay on one side of the holdout; empty: none.
    by: str = ""
    # What is to be said of its columns.
    remarks: Sequence[str] = ()


def open_table(file: Path, columns: list[str] | None, by: str | None = None) -> Table:
    """Find a table's form and columns; `columns` None: by their usual names. `by`: of the holdout. Raises UserError,
    OSError, ValueError."""
    suffix = file.suffix.lower()
    separator, first = header(file, columns) if suffix in SEPARATED else ("", [])
    if suffix == ".parquet":
        names = parquet_file(file).schema_arrow.names
    elif suffix in SEPARATED:
        names = named_columns(first)
    else:
        names = list(dict.fromkeys(name for _, row in islice(json_rows(file), FIRST_ROWS) for name in row or ()))
    chosen = chosen_columns(names, columns)
    for name in [*chosen, by or chosen[0]]:
        if name not in names:
            given = ", ".join(names[:MOST_NAMES]) + ", ..." * (len(names) > MOST_NAMES) or "none"
            remedy = "give one of them, holdout.by=COLUMN" if name == by else "give 'columns=[IMAGE,CAPTION]'"
            raise UserError(f"{file.name} has no column {name!r}; it has {given}: {remedy}")
    remarks = [f"column {name!r} is given twice; the last one counts" for name in repeated(names)]
    if suffix == ".parquet":
        wanted = [*chosen, *([by] if by else [])]
        remarks += [f"not read: {each}" for each in unread_columns(file, wanted)]
        rows: Callable[[], Rows] = partial(parquet_rows, file, wanted)
    elif suffix in SEPARATED:
        rows = partial(separated_rows, file, Separated(separator, names, chosen[0]), headed=names == first)
    else:
        rows = partial(json_rows, file)
    return Table(file, chosen, rows, by or "", remarks)


def repeated(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if name and count > 1]


def chosen_columns(names: Sequence[str], columns: list[str] | None) -> list[str]:
    """The picture's column and the captions'; of usual names those that are there, or else the first."""
    plain = {name.lower().replace(" ", "_"): name for name in reversed(names)}
    return columns or [next((plain[name] for name in usual if name in plain), usual[0]) for usual in USUAL.values()]


def lines_of(file: Path) -> Iterator[str]:
    """A text's lines, decoded by its byte order mark, or else as UTF-8, where wrong bytes become lone surrogates.

    Raises UserError for another encoding: most of the first lines with letters beyond ASCII are no UTF-8.
    """
    with file.open("rb") as raw:
        start = raw.read(START)
    encoding = encoding_of(start)
    if encoding == "utf-8":
        lines = start.splitlines()[: -1 if len(start) == START else None]
        wrong = [n for n, line in enumerate(lines, 1) if line.decode("utf-8", "ignore").encode() != line]
        if 1 < len(wrong) > sum(not line.isascii() for line in lines) / 2:
            raise UserError(
                f"{file}: line {wrong[0]} is not UTF-8, and no byte order mark says what it is; convert the table: "
                "iconv -f CP1252 -t UTF-8 OLD > NEW"
            )
    errors = "surrogateescape" if encoding.startswith("utf-8") else "surrogatepass"
    with file.open(encoding=encoding, errors=errors, newline="") as text:
        rest = iter(partial(text.readline, LONGEST_LINE), "")
        first = next(rest, "")
        yield from rest if re.fullmatch(r"\ufeff?sep=.\s*", first) else chain([first], rest)  # Excel's


def header(file: Path, columns: list[str] | None) -> tuple[str, list[str]]:
    """The separator and the first line's values: those by which the most columns are known, or a picture is named, and
    then the most values."""
    line = next(lines_of(file), "")
    split = [(mark, header_values(line, mark)) for mark in SEPARATORS]

    def known(values: list[str]) -> tuple[int, bool, int]:
        names = named_columns(values)
        return len({*names}.intersection(chosen_columns(names, columns))), names != values, len(values)

    return max(split, key=lambda each: known(each[1]))


def named_columns(first: list[str]) -> list[str]:
    """The names in a table's first line; `image`, `caption`, `caption_2` ... where that is a pair already."""
    pictures = [value for value in first if PICTURE.fullmatch(value)]
    if not pictures:
        return first
    image = first.index(min(pictures, key=len))  # a caption may end in a picture's name
    others = ["caption", *(f"caption_{number}" for number in range(2, len(first)))][: len(first) - 1]
    return [*others[:image], "image", *others[image:]]


def separated_rows(file: Path, form: Separated, *, headed: bool) -> Rows:
    lines = lines_of(file)
    if headed:
        next(lines)
    for number, row in form.rows(lines):
        if row and not headed:
            row["image"] = re.sub(r"#\d+$", "", row["image"])
        yield number + headed, row


def json_rows(file: Path) -> Rows:
    """Of JSON lines, or of a list of objects."""
    lines = lines_of(file)
    first = next(lines, "")
    if first.lstrip().startswith("["):
        yield from enumerate(
            (item if isinstance(item, dict) else None for item in json.loads(first + "".join(lines))), 1
        )
        return
    for number, line in enumerate(chain([first], lines), 1):
        try:
            if line.strip():
                yield number, json_fields(line)
        except BrokenSampleError:
            yield number, None
