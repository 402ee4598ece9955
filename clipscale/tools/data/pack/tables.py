"""Reads the rows of tables as people have them: separated values of any separator, JSON in several forms, Parquet.

A row is its number and its values by column, or None if it cannot be used. So a bad row costs one pair.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import print_line
from clipscale.data.content import PROBE_BYTES, kind_of
from clipscale.data.shards.subset import parquet_file
from clipscale.tools.data.pack.lines import lines_of
from clipscale.tools.data.pack.objects import flattening_command, is_nested, json_rows
from clipscale.tools.data.pack.parquet import parquet_rows, unread_columns
from clipscale.tools.data.pack.separated import PICTURE, Row, Separated, header_values

# The usual names of the pictures' column, and of the captions' column.
USUAL: dict[str, list[str]] = files.read_yaml(Path(__file__).with_name("columns.yaml"))
# Suffix of a file that is not a table -> the command that converts it.
CONVERSIONS: dict[str, str] = files.read_yaml(Path(__file__).with_name("conversions.yaml"))
SEPARATED = (".csv", ".tsv", ".tab", ".txt", ".token")
TABLES = (*SEPARATED, ".jsonl", ".ndjson", ".json", ".parquet")
SEPARATORS = "\t,;|"
# The number of first rows that show the columns of JSON, where each row has them as keys.
FIRST_ROWS = 100
# The field of a packed sample that lists its captions, if it has several.
CAPTION_LIST = "captions"
# Columns that a message names.
MAX_NAMES = 20
Rows = Iterator[tuple[int, Row | None]]


class PairTable(NamedTuple):
    file: Path
    # The picture's column, then the captions' columns.
    columns: list[str]
    rows: Callable[[], Rows]
    # Rows with equal values in this column stay on one side of the holdout. Empty: there is no such column.
    by: str = ""
    # Lines for the user about its columns.
    remarks: Sequence[str] = ()


def open_table(file: Path, columns: list[str] | None, by: str | None = None) -> PairTable:
    """Find a table's form and columns. `columns`: see `tables_of`. `by`: the holdout's column.

    Raises UserError, OSError, ValueError.
    """
    suffix = file.suffix.lower()
    check_content(file)
    separator, first = header(file, columns) if suffix in SEPARATED else ("", [])
    shown: list[Row] = []
    if suffix == ".parquet":
        names = parquet_file(file).schema_arrow.names
    elif suffix in SEPARATED:
        names = named_columns(first)
    else:
        shown = [row for _, row in islice(json_rows(file), FIRST_ROWS) if row]
        names = list(dict.fromkeys(name for row in shown for name in row))
    chosen = chosen_columns(names, columns)
    check_columns(file, names, chosen, by, shown)
    remarks = [f"column {name!r} is given twice; the last one counts" for name in repeated_names(names)]
    if CAPTION_LIST in names and CAPTION_LIST not in chosen:
        remarks.append(
            f"column {CAPTION_LIST!r} is lost where a pair has several captions, whose list has this name; rename it"
        )
    if suffix == ".parquet":
        wanted = [*chosen, by] if by else chosen
        remarks += [f"not read: {column}" for column in unread_columns(file, wanted)]
        rows: Callable[[], Rows] = partial(parquet_rows, file, wanted)
    elif suffix in SEPARATED:
        rows = partial(separated_rows, file, Separated(separator, names, chosen[0]), headed=names == first)
    else:
        rows = partial(json_rows, file)
    return PairTable(file, chosen, rows, by or "", remarks)


def check_columns(file: Path, names: Sequence[str], chosen: list[str], by: str | None, shown: list[Row]) -> None:
    """Raise UserError if a column is chosen twice or is not there, or if its values in `shown` are no texts.

    `shown`: the first rows of JSON.
    """
    if twice := repeated_names(chosen):
        raise UserError(f"columns names {twice[0]!r} twice; give 'columns=[IMAGE,CAPTION]'")
    wanted = [*chosen, by] if by else chosen
    missing = [name for name in wanted if name not in names]
    with_objects = [name for name in chosen[1:] if is_nested(shown, name)]
    if with_objects or (missing and missing[0] != by):
        line = flattening_command(file, names)
        if line:
            raise UserError(f"{file.name}: its captions are nested; this makes a table of it, to be packed: {line}")
    if with_objects:
        raise UserError(
            f"{file.name}: column {with_objects[0]!r} holds objects, and no captions; write a table with one of texts"
        )
    if missing:
        there = ", ".join(names[:MAX_NAMES]) or "none"
        if len(names) > MAX_NAMES:
            there += ", ..."
        remedy = "give one of them, holdout.by=COLUMN" if missing[0] == by else "give 'columns=[IMAGE,CAPTION]'"
        raise UserError(f"{file.name} has no column {missing[0]!r}; it has {there}: {remedy}")


def check_content(file: Path) -> None:
    """Raise UserError for a compressed table, or Excel's, by its first bytes."""
    with file.open("rb") as start:
        kind = kind_of(start.read(PROBE_BYTES))
    if kind and kind.suffix in CONVERSIONS:
        raise UserError(f"{file.name} is not text; {conversion_command(kind.suffix, file)}")


def conversion_command(suffix: str, file: Path) -> str:
    """The command that makes a table of a file of this kind; empty for an unknown kind."""
    table = file.with_suffix("") if file.suffix == suffix else file.with_name(f"{file.stem}-2{file.suffix}")
    names = {"file": file, "table": table, "stem": file.with_suffix("")}
    return CONVERSIONS.get(suffix, "").format(**{name: shlex.quote(str(path)) for name, path in names.items()})


def repeated_names(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if name and count > 1]


def chosen_columns(names: Sequence[str], columns: list[str] | None) -> list[str]:
    """The picture's column, then the captions'. Without `columns`, the usual names that the table has, or the first."""
    if columns:
        return columns
    by_plain_name = {name.lower().replace(" ", "_"): name for name in reversed(names)}
    chosen = []
    for usual in USUAL.values():
        there = [by_plain_name[name] for name in usual if name in by_plain_name]
        chosen.append(there[0] if there else usual[0])
    return chosen


def header(file: Path, columns: list[str] | None) -> tuple[str, list[str]]:
    """The separator, and the first line's values.

    The separator is the one that gives the most columns with usual names. In a tie it is one by which the line names a
    picture, and then the one that gives the most values.
    """
    line = next(lines_of(file), "")
    split = [(mark, header_values(line, mark)) for mark in SEPARATORS]

    def score(values: list[str]) -> tuple[int, bool, int]:
        names = named_columns(values)
        return len({*names}.intersection(chosen_columns(names, columns))), names != values, len(values)

    return max(split, key=lambda pair: score(pair[1]))


def named_columns(first: list[str]) -> list[str]:
    """The names in a table's first line. If that line is a pair already: `image`, `caption`, `caption_2` ..."""
    pictures = [value for value in first if PICTURE.fullmatch(value)]
    if not pictures:
        return first
    image = first.index(min(pictures, key=len))  # a caption may end in a picture's name
    others = ["caption", *(f"caption_{number}" for number in range(2, len(first)))][: len(first) - 1]
    return [*others[:image], "image", *others[image:]]


def separated_rows(file: Path, form: Separated, *, headed: bool) -> Rows:
    """The rows of separated values. `headed`: the first line names the columns; without it pictures may have `#N`.

    At the end a line warns of quotes that a backslash escapes.
    """
    lines = lines_of(file)
    if headed:
        next(lines)
    for number, row in form.rows(lines):
        if row and not headed:
            row["image"] = re.sub(r"#\d+$", "", str(row["image"]))
        yield number + 1 if headed else number, row
    if form.escaped_at:
        print_line(
            rf"warning: {file.name}: row {form.escaped_at + headed} has a quote inside of quotes as \", which CSV does"
            ' not know; write such quotes doubled, "", and pack the table again',
            error=True,
        )
