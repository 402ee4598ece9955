"""Tables of picture paths and captions (CSV, TSV, Parquet), and folders of pictures, read as if they were shards.

A table is cut into virtual shards of some thousand rows. Their addresses, `table:PATH?image=COLUMN&caption=COLUMN#FIRST-LAST@WHERE`, say
where the rows begin, so a reader opens the table there; order, resuming and broken samples then work as with tar files.
"""

import csv
import importlib.util
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

from clipscale.config.data import TableConfig
from clipscale.data.decode import IMAGE_TYPES
from clipscale.data.order import permutation
from clipscale.data.sample import MOST_BYTES, RawSample
from clipscale.data.shards.access import SourceError, digest, is_local, leaf_of, own_cache, scheme_of
from clipscale.data.shards.index import NO_FILE
from clipscale.data.shards.store import Store
from clipscale.errors import UserError

IMAGE_COLUMNS = ("filepath", "image", "image_path", "path", "file", "file_name", "filename", "jpg")
CAPTION_COLUMNS = ("title", "caption", "text", "txt")
"""Names looked for, in this order, where the settings give none (the first ones are open_clip's)."""
LONGEST_FIELD = 1 << 24
_LISTING = "filepath", "caption", "sidecar"


@dataclass(frozen=True)
class Part:
    """A virtual shard: rows first..last of a table."""

    path: str
    image: str
    caption: str
    sidecar: str
    """Column naming a text file that has the caption instead, or empty."""
    first: int
    last: int
    where: str
    """Byte offset of the first row (CSV, TSV), or row group and row in it, `GROUP.ROW` (Parquet)."""

    @property
    def url(self) -> str:
        """Its address."""
        columns = {"image": self.image, "caption": self.caption} | ({"sidecar": self.sidecar} if self.sidecar else {})
        return f"table:{quote(self.path)}?{urlencode(columns)}#{self.first}-{self.last}@{self.where}"


def part_of(url: str) -> Part:
    """The virtual shard that an address names."""
    match = re.match(r"^table:([^?]*)\?([^#]*)#(\d+)-(\d+)@([\d.]+)$", url)
    if not match:
        raise ValueError(f"{url!r} is no address of a table's rows")
    columns = dict(parse_qsl(match[2]))
    first, last = int(match[3]), int(match[4])
    return Part(
        unquote(match[1]), columns["image"], columns["caption"], columns.get("sidecar", ""), first, last, match[5]
    )


def rows_of(url: str) -> int:
    """How many rows a virtual shard has."""
    part = part_of(url)
    return part.last - part.first


def is_parquet(url: str) -> bool:
    """Whether a table is a Parquet file."""
    return leaf_of(url).endswith(".parquet")


# -- from a setting to virtual shards ----------------------------------------------------------------------------------


def shards_of(path: str, config: TableConfig, setting: str) -> list[str]:
    """The addresses of a table's virtual shards. Raises UserError for a table without the columns, or that cannot be read."""
    path = os.path.abspath(path) if is_local(path) else path  # noqa: PTH100 (as it is named)
    try:
        names, cuts = (_parquet_cuts if is_parquet(path) else _text_cuts)(path, config.rows)
    except (OSError, UnicodeDecodeError, csv.Error, ValueError, SourceError) as error:
        raise UserError(f"{setting}={path!r}: the table cannot be read ({error})") from error
    image = _column(names, config.image, IMAGE_COLUMNS, "image", path)
    caption = _column(names, config.caption, CAPTION_COLUMNS, "caption", path)
    part = Part(path, image, caption, "", 0, 0, "")
    return [replace(part, first=first, last=last, where=where).url for first, last, where in cuts]


def _column(names: list[str], given: str | None, usual: tuple[str, ...], what: str, path: str) -> str:
    if given is not None and given in names:
        return given
    if given is None and (found := next((name for name in usual if name in names), None)):
        return found
    raise UserError(
        f"data.table.{what}={given or 'null'}: {path} has the columns {', '.join(names)}; say which one has the {what}"
    )


class _Lines:
    """A text file's lines, and the byte offset of the next one."""

    def __init__(self, file: Any, at: int = 0) -> None:
        self._file, self.at = file, at
        file.seek(at)

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self.at += len(line)
            yield line.decode("utf-8-sig" if self.at == len(line) else "utf-8")


def _rows(path: str, lines: _Lines) -> Iterator[list[str]]:
    csv.field_size_limit(LONGEST_FIELD)
    return csv.reader(lines, delimiter="\t" if leaf_of(path).endswith(".tsv") else ",")


def _text_cuts(path: str, rows: int) -> tuple[list[str], list[tuple[int, int, str]]]:
    """Column names, and where every `rows`-th row begins; remembered until the table changes, since all of it must be read."""
    opened = Store().open(path)
    with closing(_buffered(opened.stream)) as file:
        stamp = [path, opened.size, opened.stamp, rows]
        note = own_cache() / "tables" / f"{digest(json.dumps(stamp))}.json"
        if note.is_file():
            found = json.loads(note.read_text())
            return found["names"], [tuple(cut) for cut in found["cuts"]]
        starts: list[int] = []
        count = 0
        lines = _Lines(file)
        reader = _rows(path, lines)
        names = next(reader, [])
        at = lines.at
        for row in reader:
            if row:  # csv gives an empty list for an empty line
                if count % rows == 0:
                    starts.append(at)
                count += 1
            at = lines.at
    cuts = [(n * rows, min((n + 1) * rows, count), str(start)) for n, start in enumerate(starts)]
    _write(note, json.dumps({"names": names, "cuts": cuts}))
    return names, cuts


def _parquet() -> Any:
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError("data.train: Parquet tables need the package pyarrow; pip install 'clipscale[parquet]'")
    from pyarrow import parquet

    return parquet


@contextmanager
def _parquet_file(path: str, store: Store) -> Iterator[Any]:
    """A Parquet file; pyarrow reads local ones by itself, without asking Python for every stretch of bytes."""
    parquet = _parquet()
    if is_local(path):
        with parquet.ParquetFile(path) as file:
            yield file
    else:
        with closing(store.open(path).stream) as stream, parquet.ParquetFile(stream) as file:
            yield file


def _parquet_cuts(path: str, rows: int) -> tuple[list[str], list[tuple[int, int, str]]]:
    cuts = []
    before = 0
    with _parquet_file(path, Store()) as file:
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            cuts += [
                (before + start, before + min(start + rows, size), f"{group}.{start}") for start in range(0, size, rows)
            ]
            before += size
        return list(file.schema_arrow.names), cuts


def shards_of_folder(folder: str, config: TableConfig, setting: str) -> list[str]:
    """The virtual shards of a folder of pictures, those of its sub-folders included.

    A picture's caption is the text file of the same name beside it, or else its folder's name with `_` as spaces (its class). The list is
    put in an order of its own first, since neighbours in a class folder share their caption; it lies in the user's cache folder.
    """
    folder = os.path.abspath(folder)  # noqa: PTH100 (links stay as they are)
    found: list[tuple[str, str, str]] = []
    for place, folders, files in os.walk(folder):
        folders.sort()
        present = set(files)
        name = Path(place).name.replace("_", " ") if Path(place) != Path(folder) else ""
        for file in sorted(files):
            stem, _, extension = file.rpartition(".")
            if extension.lower() in IMAGE_TYPES and stem:
                sidecar = f"{stem}.txt" if f"{stem}.txt" in present else ""
                found.append((str(Path(place) / file), name, str(Path(place) / sidecar) if sidecar else ""))
    if not found:
        return []
    lines: list[str] = []
    writer = csv.writer(_Appender(lines))
    writer.writerow(_LISTING)
    for at in permutation(len(found), len(found)):
        writer.writerow(found[at])
    text = "".join(lines)
    # by its content too: a run that reads the list must not have it changed when another finds more pictures in the folder
    path = own_cache() / "tables" / f"{digest(folder)}-{digest(text)}.csv"
    try:
        if not path.is_file() or path.stat().st_size != len(text.encode("utf-8", "surrogateescape")):
            _write(path, text)
    except OSError as error:
        raise UserError(f"{setting}={folder!r}: the list of its pictures cannot be written ({error})") from error
    own = TableConfig(image="filepath", caption="caption", rows=config.rows)
    return [replace(part_of(url), sidecar="sidecar").url for url in shards_of(str(path), own, setting)]


class _Appender:
    """What csv.writer writes to: a list of lines."""

    def __init__(self, lines: list[str]) -> None:
        self.write = lines.append


def _write(path: Path, text: str) -> None:
    """All of it or nothing; processes that write the same at once do no harm."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, errors="surrogateescape") as out:
        out.write(text)
    Path(out.name).replace(path)


# -- reading -----------------------------------------------------------------------------------------------------------


def read(
    url: str, want: Callable[[int], bool], kinds: Mapping[str, int] | None, store: Store
) -> Generator[RawSample, None, None]:
    """The rows of a virtual shard as samples: the picture under its extension, the caption as `txt`, the whole row as `json`.

    A sample's key is its picture's path. Its members (`kinds` of them, as for `read_shard`) are read when it is filled; then one whose file
    is not there has the damage `missing_file`. Raises OSError, SourceError.
    """
    part = part_of(url)
    # The other may hash what it opens, and cannot seek then. What this one's threads see it counts when all is closed.
    own = Store(store.access, store.tally, store.tick, store.late)
    rows = _parquet_rows(part, own) if is_parquet(part.path) else _text_rows(part, own)
    for index, row in enumerate(rows):
        image = row.get(part.image)
        name = str((image.get("path") or "") if isinstance(image, dict) else image if isinstance(image, str) else "")
        key = name or f"row {part.first + index}"
        raw = RawSample(url, key, index, {}, extent=_extent(row))
        if want(index):
            raw.later = partial(_fill, raw, part, row, name, kinds, store)
        yield raw


def _extent(value: Any) -> int:
    """Bytes of what a row says by itself, about."""
    if isinstance(value, dict):
        return sum(map(_extent, value.values()))
    return len(value) if isinstance(value, bytes | str) else 8


def _fill(
    raw: RawSample, part: Part, row: dict[str, Any], name: str, kinds: Mapping[str, int] | None, store: Store
) -> None:
    try:
        _read_members(raw, part, row, name, kinds, store)
    except FileNotFoundError as error:
        raw.damage, raw.detail = "missing_file", str(error)
    except SourceError as error:
        raw.damage, raw.detail = error.reason.replace("_shard", "_file"), str(error)
    except (OSError, ValueError) as error:  # a folder, a file of somebody else's, a name that no file can have
        raw.damage, raw.detail = "unreadable_file", str(error)
    if raw.damage:
        raw.members = {}


def _read_members(
    raw: RawSample, part: Part, row: dict[str, Any], name: str, kinds: Mapping[str, int] | None, store: Store
) -> None:
    def keep(extension: str, content: Callable[[int], bytes]) -> None:
        """Where it is wanted; `content` gives up to so many bytes of it."""
        if kinds is None or extension in kinds:
            data = content(1 + (MOST_BYTES if kinds is None else kinds[extension]))
            if raw.admits(f"{raw.key}, {extension}", extension, len(data), kinds):
                raw.members[extension] = data

    image = row.get(part.image)
    if isinstance(image, dict):  # as Hugging Face's datasets hold pictures
        image = image.get("bytes")
    extension = name.rpartition(".")[2].lower()
    extension = extension if extension in IMAGE_TYPES else "jpg"
    if isinstance(image, bytes):
        keep(extension, lambda _: image)
    elif name:
        keep(extension, partial(_content, _beside(part.path, name), store))
    else:
        raise FileNotFoundError("no picture is named")
    caption = row.get(part.caption)
    if part.sidecar and row.get(part.sidecar):
        keep("txt", partial(_content, row[part.sidecar], store))
    elif caption is not None:
        keep("txt", lambda _: str(caption).encode("utf-8", "surrogatepass"))
    plain = {column: value for column, value in row.items() if not isinstance(value, bytes | dict)}
    keep("json", lambda _: json.dumps(plain, default=str).encode())


def _beside(table: str, name: str) -> str:
    """Where a picture is that a table names: at an address, at a path of this machine, or beside the table."""
    if is_local(table):
        return name if not is_local(name) else str(Path(table).parent / name)
    if not is_local(name) or name.startswith("/"):
        return name
    folder = table.split("?", 1)[0].rsplit("/", 1)[0]
    return f"{folder}/{quote(name) if scheme_of(table) in ('http', 'https') else name}"


def _buffered(stream: Any) -> Any:
    """As a stream with lines."""
    return io.BufferedReader(stream, 1 << 16) if isinstance(stream, io.RawIOBase) else stream


def _content(place: str, store: Store, most: int) -> bytes:
    if scheme_of(place) in NO_FILE:
        raise SourceError("refused_file", f"{place}: a table names files, not commands")
    stream = store.open(place).stream
    try:
        data: bytes = stream.read(most)
    finally:
        stream.close()
    return data


def _text_rows(part: Part, store: Store) -> Iterator[dict[str, Any]]:
    try:
        with closing(_buffered(store.open(part.path).stream)) as file:
            names = next(_rows(part.path, _Lines(file)), [])
            left = part.last - part.first
            for row in _rows(part.path, _Lines(file, int(part.where))):
                if row and left:
                    left -= 1
                    yield dict(zip(names, row))
                if not left:
                    return
    except (csv.Error, UnicodeDecodeError) as error:
        raise SourceError("unreadable_shard", str(error)) from error


def _parquet_rows(part: Part, store: Store) -> Iterator[dict[str, Any]]:
    group, start = map(int, part.where.split("."))
    try:
        with _parquet_file(part.path, store) as file:
            # no threads: what a remote file does while it waits is for the reading thread only
            rows = 1 if _holds_pictures(file, part.image) else 256
            batches = file.iter_batches(rows, row_groups=[group], use_threads=False)
            yield from islice(
                (row for batch in batches for row in batch.to_pylist()), start, start + part.last - part.first
            )
    except (ValueError, KeyError) as error:  # pyarrow's own errors are ValueErrors
        raise SourceError("unreadable_shard", str(error)) from error


def _holds_pictures(file: Any, column: str) -> bool:
    """Whether a Parquet column has pictures, not their names: rows that are read one by one, since they may be large."""
    kind = str(file.schema_arrow.field(column).type)
    return "binary" in kind or kind.startswith("struct")
