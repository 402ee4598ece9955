"""Reads tables of picture paths and captions (CSV, TSV) as shards.

A table is cut into virtual shards of some thousand rows with addresses `table:PATH?image=COLUMN&caption=COLUMN&...`.
"""

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode

from clipscale.common.errors import UserError
from clipscale.config.data import TableConfig
from clipscale.data.decode import IMAGE_TYPES
from clipscale.data.sample import MAX_IMAGE_BYTES, RawSample
from clipscale.data.shards.addresses import SourceError, is_local

IMAGE_COLUMNS = ("filepath", "image", "image_path", "path", "file", "file_name", "filename", "jpg")
CAPTION_COLUMNS = ("title", "caption", "text", "txt")
"""Names tried in this order where the settings give none (the first ones are open_clip's)."""
ROWS = 10_000
"""Rows of a virtual shard. Epochs shuffle shards; resumed runs read them again."""
LONGEST_LINE = 1 << 24
"""Bytes of the longest line, and of a field; the standard library's limit of 128 Ki is too short for some columns."""
csv.field_size_limit(LONGEST_LINE)


class Part(NamedTuple):
    """A virtual shard: rows first..last of a table."""

    path: str
    image: str
    caption: str
    first: int
    last: int
    at: int
    """Byte offset of the first row."""
    root: str = ""
    """Folder that the files must lie in, or empty: the table's own."""

    @property
    def url(self) -> str:
        """Its address."""
        fields = self._asdict()
        return f"table:{quote(fields.pop('path'))}?{urlencode(fields)}"


def part_of(url: str) -> Part:
    """The virtual shard at an address."""
    path, _, query = url.removeprefix("table:").partition("?")
    fields: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
    return Part(unquote(path), **fields | {name: int(fields[name]) for name in ("first", "last", "at")})


def table_shards(path: str, config: TableConfig, setting: str) -> list[str]:
    """The addresses of a table's virtual shards. Raises UserError if it cannot be read or lacks the columns."""
    path = os.path.abspath(path)  # noqa: PTH100 (as it is named)
    try:
        names, parts = _cuts(path, Path(path).stat().st_mtime_ns, ROWS)
    except (OSError, csv.Error, ValueError) as error:
        raise UserError(f"{setting}={path!r}: the table cannot be read ({error})") from error
    image = _column(names, config.image, IMAGE_COLUMNS, "image", path)
    caption = _column(names, config.caption, CAPTION_COLUMNS, "caption", path)
    root = config.root or ""
    return [Part(path, image, caption, first, last, at, root).url for first, last, at in parts]


def _column(names: list[str], given: str | None, usual: tuple[str, ...], what: str, path: str) -> str:
    column = next((name for name in (usual if given is None else (given,)) if name in names), None)
    if column is None:
        has = f"{path} has the columns {', '.join(names)}"
        raise UserError(f"data.table.{what}={given or 'null'}: {has}; say which one has the {what}")
    return column


@lru_cache(maxsize=64)
def _cuts(path: str, changed: int, rows: int) -> tuple[list[str], list[tuple[int, int, int]]]:
    """Column names; the first row, end and byte offset of each virtual shard. Reads the whole table."""
    starts: list[int] = []
    count = 0
    with open(path, "rb") as file:  # noqa: PTH123 (as it is named)
        reader = _csv_rows(path, file)
        names = next(reader, [])
        at = file.tell()
        for row in reader:
            if row:  # csv gives an empty list for an empty line
                if count % rows == 0:
                    starts.append(at)
                count += 1
            at = file.tell()
    return names, [(n * rows, min((n + 1) * rows, count), start) for n, start in enumerate(starts)]


def _csv_rows(path: str, file: Any) -> Iterator[list[str]]:
    def lines() -> Iterator[str]:
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                raise csv.Error(f"a line of more than {LONGEST_LINE} bytes")
            yield line.decode().removeprefix("\ufeff")

    return csv.reader(lines(), delimiter="\t" if path.endswith(".tsv") else ",")


def _rows(part: Part) -> Iterator[dict[str, str]]:
    with open(part.path, "rb") as file:  # noqa: PTH123 (as it is named)
        names = next(_csv_rows(part.path, file), [])
        file.seek(part.at)
        rows = (row for row in _csv_rows(part.path, file) if row)
        for row in islice(rows, part.last - part.first):
            yield dict(zip(names, row))


def read_rows(url: str, want: Callable[[int], bool], kinds: Mapping[str, int] | None) -> Iterator[RawSample]:
    """The rows of a virtual shard as samples: the picture under its extension, the caption as `txt`, the row as `json`.

    A sample's key is its picture's path. `load` reads its members (those in `kinds`, as for `read_shard`); a row whose
    picture does not exist then has the damage `missing_file`. Raises OSError, ValueError, csv.Error.
    """
    part = part_of(url)
    for index, row in enumerate(_rows(part)):
        extent = sum(map(len, row.values()))
        raw = RawSample(url, str(row.get(part.image) or f"row {part.first + index}"), index, {}, extent=extent)
        if want(index):
            raw.deferred = partial(_load, raw, part, row, kinds)
        yield raw


def _load(raw: RawSample, part: Part, row: dict[str, str], kinds: Mapping[str, int] | None) -> None:
    """Read a row's members; notes damage in the sample."""

    def add(extension: str, content: Callable[[int], bytes]) -> None:
        """Add a member if it is wanted; `content` gives at most so many bytes of it."""
        if kinds is None or extension in kinds:
            data = content(1 + (MAX_IMAGE_BYTES if kinds is None else kinds[extension]))
            if raw.accepts(f"{raw.key}, {extension}", extension, len(data), kinds):
                raw.members[extension] = data

    name, caption = str(row.get(part.image) or ""), row.get(part.caption)
    extension = name.rpartition(".")[2].lower()
    try:
        add(extension if extension in IMAGE_TYPES else "jpg", partial(_content, part, name))
        if caption is not None:
            add("txt", lambda _: str(caption).encode("utf-8", "surrogatepass"))
        add("json", lambda _: json.dumps(row).encode())
    except (SourceError, OSError, ValueError) as error:  # ValueError: a name that no file can have
        other = "missing_file" if isinstance(error, FileNotFoundError) else "unreadable_file"
        raw.members, raw.damage, raw.detail = {}, getattr(error, "reason", other), str(error)


def _content(part: Part, name: str, most: int) -> bytes:
    """The first `most` bytes of a file that a table names: the writer of a table must not choose among all files.

    Raises SourceError `refused_file` for one outside of the table's folder or `data.table.root`.
    """
    folder = Path(part.path).parent
    root = Path(part.root).expanduser() if part.root else folder
    if not is_local(name) or not (path := (folder / name).resolve()).is_relative_to(root.resolve()):
        raise SourceError("refused_file", f"{name}: the table names what lies outside of {root}; see data.table.root")
    with path.open("rb") as file:
        return file.read(most)
