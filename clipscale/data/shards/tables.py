"""Reads tables of picture paths and captions (CSV, TSV, Parquet), and folders of pictures, as shards.

A table is cut into virtual shards of some thousand rows with addresses
`table:PATH?image=COLUMN&caption=COLUMN#FIRST-LAST@WHERE`. Parquet is read by pyarrow; CSV by the standard library,
since pyarrow does not return the byte offset at which a virtual shard's first row begins.
"""

import csv
import io
import json
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.data import TableConfig
from clipscale.data.decode import IMAGE_TYPES
from clipscale.data.order import permutation
from clipscale.data.sample import MAX_IMAGE_BYTES, RawSample
from clipscale.data.shards import parquet
from clipscale.data.shards.access import SourceError, digest, is_local, leaf_of, scheme_of, user_cache
from clipscale.data.shards.store import Store

IMAGE_COLUMNS = ("filepath", "image", "image_path", "path", "file", "file_name", "filename", "jpg")
CAPTION_COLUMNS = ("title", "caption", "text", "txt")
"""Names tried in this order where the settings give none (the first ones are open_clip's)."""
REMOTE = ("http", "https", "s3", "s3a", "gs", "gcs", "hf")
"""Schemes that a local table may name. fsspec knows others that read this machine's files, such as `simplecache:`."""
LONGEST_FIELD = 1 << 24
"""Characters of the longest CSV field; the standard library's limit of 128 Ki is too short for some json columns."""


class Part(NamedTuple):
    """A virtual shard: rows first..last of a table."""

    path: str
    image: str
    caption: str
    sidecar: str
    """Column with the path of a text file that has the caption instead, or empty."""
    first: int
    last: int
    where: str
    """Byte offset of the first row (CSV, TSV), or its row group and row in the group, `GROUP.ROW` (Parquet)."""
    root: str = ""
    """Folder that may hold the files unless `data.table.root` names one, or empty: the table's own."""

    @property
    def url(self) -> str:
        """Its address."""
        columns = {"image": self.image, "caption": self.caption}
        columns |= {"sidecar": self.sidecar, "root": self.root} if self.sidecar else {}
        return f"table:{quote(self.path)}?{urlencode(columns)}#{self.first}-{self.last}@{self.where}"


def part_of(url: str) -> Part:
    """The virtual shard at an address."""
    match = re.match(r"^table:([^?]*)\?([^#]*)#([0-9]{1,18})-([0-9]{1,18})@([0-9]{1,18}(?:\.[0-9]{1,18})?)$", url)
    if not match:
        raise ValueError(f"{url!r} is no address of a table's rows")
    columns = dict(parse_qsl(match[2]))
    named = columns["image"], columns["caption"], columns.get("sidecar", "")
    return Part(unquote(match[1]), *named, int(match[3]), int(match[4]), match[5], columns.get("root", ""))


def table_shards(path: str, config: TableConfig, setting: str) -> list[str]:
    """The addresses of a table's virtual shards. Raises UserError if it cannot be read or lacks the columns."""
    path = os.path.abspath(path) if is_local(path) else path  # noqa: PTH100 (as it is named)
    try:
        names, cuts = (parquet.cuts if parquet.named(path) else _text_cuts)(path, config.rows)
    except (OSError, UnicodeDecodeError, csv.Error, ValueError, SourceError) as error:
        raise UserError(f"{setting}={path!r}: the table cannot be read ({error})") from error
    image = _column(names, config.image, IMAGE_COLUMNS, "image", path)
    caption = _column(names, config.caption, CAPTION_COLUMNS, "caption", path)
    return [Part(path, image, caption, "", first, last, where).url for first, last, where in cuts]


def _column(names: list[str], given: str | None, usual: tuple[str, ...], what: str, path: str) -> str:
    found = next((name for name in (usual if given is None else (given,)) if name in names), None)
    if found is None:
        has = f"{path} has the columns {', '.join(names)}"
        raise UserError(f"data.table.{what}={given or 'null'}: {has}; say which one has the {what}")
    return found


def _text_cuts(path: str, rows: int) -> parquet.Cuts:
    """Reads the whole table to find every `rows`-th row, and remembers the result until the table changes."""
    opened = Store().open(path)
    with closing(_buffered(opened.stream)) as file:
        stamp = [path, opened.size, opened.version, rows]
        record = user_cache() / "tables" / f"{digest(json.dumps(stamp))}.json"
        if record.is_file():
            found = json.loads(record.read_text())
            return found["names"], [tuple(cut) for cut in found["cuts"]]
        starts: list[int] = []
        count = 0
        lines = _Lines(file)
        reader = _csv_rows(path, lines)
        names = next(reader, [])
        at = lines.at
        for row in reader:
            if row:  # csv gives an empty list for an empty line
                if count % rows == 0:
                    starts.append(at)
                count += 1
            at = lines.at
    cuts = [(n * rows, min((n + 1) * rows, count), str(start)) for n, start in enumerate(starts)]
    _write(record, json.dumps({"names": names, "cuts": cuts}))
    return names, cuts


def folder_shards(folder: str, config: TableConfig, setting: str) -> list[str]:
    """The virtual shards of a folder of pictures and its sub-folders.

    A picture's caption is the text file of the same name beside it, or else its folder's name with spaces for `_` (its
    class). The list of pictures is a table in the user's cache folder, in a fixed random order, since neighbours in a
    class folder share their caption.
    """
    folder = os.path.abspath(folder)  # noqa: PTH100 (links stay as they are)
    found: list[tuple[str, str, str]] = []
    for place, folders, found_files in os.walk(folder):
        folders.sort()
        present = set(found_files)
        name = Path(place).name.replace("_", " ") if Path(place) != Path(folder) else ""
        for file in sorted(found_files):
            stem, _, extension = file.rpartition(".")
            if extension.lower() in IMAGE_TYPES and stem:
                sidecar = str(Path(place) / f"{stem}.txt") if f"{stem}.txt" in present else ""
                found.append((str(Path(place) / file), name, sidecar))
    if not found:
        return []
    table = io.StringIO(newline="")
    rows = (found[at] for at in permutation(len(found), len(found)))
    csv.writer(table).writerows([("filepath", "caption", "sidecar"), *rows])
    text = table.getvalue()
    # named by content too: a run must keep its list when another run finds more pictures in the folder
    path = user_cache() / "tables" / f"{digest(folder)}-{digest(text)}.csv"
    try:
        if not path.is_file() or path.stat().st_size != len(text.encode("utf-8", "surrogateescape")):
            _write(path, text)
    except OSError as error:
        raise UserError(f"{setting}={folder!r}: the list of its pictures cannot be written ({error})") from error
    urls = table_shards(str(path), TableConfig(image="filepath", caption="caption", rows=config.rows), setting)
    root = str(files.own_root(folder))
    return [part_of(url)._replace(sidecar="sidecar", root=root).url for url in urls]


def _write(path: Path, text: str) -> None:
    """Write the file as a whole or not at all, also when several processes do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, text, errors="surrogateescape")


def read_rows(
    url: str, want: Callable[[int], bool], kinds: Mapping[str, int] | None, store: Store
) -> Generator[RawSample, None, None]:
    """The rows of a virtual shard as samples: the picture under its extension, the caption as `txt`, the row as `json`.

    A sample's key is its picture's path. `load` reads its members (those in `kinds`, as for `read_shard`); a row whose
    picture does not exist then has the damage `missing_file`. Raises OSError, SourceError.
    """
    part = part_of(url)
    # `store` may hash what it opens, and a hashed stream cannot seek
    own = Store(store.access, store.counts, store.tick, store.pending)
    if parquet.named(part.path):
        rows = parquet.rows(own, part.path, part.where, part.last - part.first, part.image)
    else:
        rows = _text_rows(part, own)
    for index, row in enumerate(rows):
        image = row.get(part.image)
        name = str((image.get("path") or "") if isinstance(image, dict) else image if isinstance(image, str) else "")
        raw = RawSample(url, name or f"row {part.first + index}", index, {}, extent=_extent(row))
        if want(index):
            raw.deferred = partial(_load, raw, part, row, name, kinds, store)
        yield raw


def _extent(value: Any) -> int:
    """Bytes of a row's own content, approximately."""
    if isinstance(value, dict):
        return sum(map(_extent, value.values()))
    return len(value) if isinstance(value, bytes | str) else 8


def _load(
    raw: RawSample, part: Part, row: dict[str, Any], name: str, kinds: Mapping[str, int] | None, store: Store
) -> None:
    """Read a row's members; notes damage in the sample."""

    def keep(extension: str, content: Callable[[int], bytes]) -> None:
        """Add a member if it is wanted; `content` gives at most so many bytes of it."""
        if kinds is None or extension in kinds:
            data = content(1 + (MAX_IMAGE_BYTES if kinds is None else kinds[extension]))
            if raw.accepts(f"{raw.key}, {extension}", extension, len(data), kinds):
                raw.members[extension] = data

    image, caption = row.get(part.image), row.get(part.caption)
    if isinstance(image, dict):  # as Hugging Face's datasets hold pictures
        image = image.get("bytes")
    extension = name.rpartition(".")[2].lower()
    plain = {column: value for column, value in row.items() if not isinstance(value, bytes | dict)}
    root = store.access.root or part.root
    try:
        if not isinstance(image, bytes) and not name:
            raise FileNotFoundError("no picture is named")
        picture = (lambda _: image) if isinstance(image, bytes) else partial(_content, part.path, name, root, store)
        keep(extension if extension in IMAGE_TYPES else "jpg", picture)
        if part.sidecar and row.get(part.sidecar):
            keep("txt", partial(_content, part.path, row[part.sidecar], root, store))
        elif caption is not None:
            keep("txt", lambda _: str(caption).encode("utf-8", "surrogatepass"))
        keep("json", lambda _: json.dumps(plain, default=str).encode())
    except FileNotFoundError as error:
        raw.damage, raw.detail = "missing_file", str(error)
    except SourceError as error:
        raw.damage, raw.detail = error.reason.replace("_shard", "_file"), str(error)
    except (OSError, ValueError) as error:  # a folder, a file without permission, a name that no file can have
        raw.damage, raw.detail = "unreadable_file", str(error)
    if raw.damage:
        raw.members = {}


def place_of(table: str, name: str, root: str | None = None) -> str:
    """The path or address of a file that a table names; a relative name lies beside the table.

    A local table may name addresses of web servers and buckets, and local files in its folder. A remote one may name its
    own server's or bucket's. `root` allows a folder, or addresses that begin with it, instead. Raises SourceError
    `refused_file` for all others: the writer of a table must not choose among the reader's files.
    """
    place = _beside(table, name)
    if is_local(place):
        given = Path(root).expanduser() if root else None if scheme_of(table) else files.own_root(Path(table).parent)
        allowed = given is not None and files.inside(place, given)
    elif is_local(table):
        allowed = scheme_of(place) in REMOTE
    else:
        allowed = _origin(place) == _origin(table) or bool(root and place.startswith(root.rstrip("/") + "/"))
    if not allowed or (not is_local(place) and "::" in place):  # fsspec's `::` leads to other file systems
        what = f"a file outside {root or 'its own folder or server'}"
        raise SourceError("refused_file", f"{name}: the table names {what}; data.table.root=FOLDER allows one")
    return place


def _beside(table: str, name: str) -> str:
    """Where a picture is that a table names: at an address, at a path of this machine, or beside the table."""
    if is_local(table):
        return name if not is_local(name) else str(Path(table).parent / name)
    if not is_local(name) or name.startswith("/"):
        return name
    folder = table.split("?", 1)[0].rsplit("/", 1)[0]
    return f"{folder}/{quote(name) if scheme_of(table) in ('http', 'https') else name}"


def _origin(url: str) -> tuple[str, ...]:
    """What one owner publishes: a server, a bucket, a repository of the hub."""
    return tuple(url.split("?", 1)[0].split("/")[: 5 if scheme_of(url) == "hf" else 3])


def _content(table: str, name: str, root: str | None, store: Store, most: int) -> bytes:
    """The first `most` bytes of a file that a table names. Never runs a command: the writer of a table may not."""
    with closing(store.open(place_of(table, name, root)).stream) as stream:
        data: bytes = stream.read(most)
    return data


class _Lines:
    """A text file's lines, and the byte offset of the next one."""

    def __init__(self, file: Any, at: int = 0) -> None:
        self._file, self.at = file, at
        file.seek(at)

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(LONGEST_FIELD + 1):
            if len(line) > LONGEST_FIELD:
                raise csv.Error(f"a line of more than {LONGEST_FIELD} bytes")
            self.at += len(line)
            yield line.decode("utf-8-sig" if self.at == len(line) else "utf-8")


def _csv_rows(path: str, lines: _Lines) -> Iterator[list[str]]:
    csv.field_size_limit(LONGEST_FIELD)
    return csv.reader(lines, delimiter="\t" if leaf_of(path).endswith(".tsv") else ",")


def _buffered(stream: Any) -> Any:
    """The stream with lines."""
    return io.BufferedReader(stream, 1 << 16) if isinstance(stream, io.RawIOBase) else stream


def _text_rows(part: Part, store: Store) -> Iterator[dict[str, Any]]:
    try:
        with closing(_buffered(store.open(part.path).stream)) as file:
            names = next(_csv_rows(part.path, _Lines(file)), [])
            rows = (row for row in _csv_rows(part.path, _Lines(file, int(part.where))) if row)
            for row in islice(rows, part.last - part.first):
                yield dict(zip(names, row))
    except (csv.Error, UnicodeDecodeError) as error:
        raise SourceError("unreadable_shard", str(error)) from error
