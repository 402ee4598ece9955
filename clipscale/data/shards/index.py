"""The index of a folder of shards: how many samples each holds, where they begin, its size, and a checksum.

One SQLite file per folder, replaced as a whole: readers never see one half written. A sample's place is the offset of its first header;
what lies up to the next sample's is its members, so a read begins at any sample and asks for no header in between. Two to four bytes a
sample. An entry counts only for the very file it was made from: size and time of change for local shards, size and version
(ETag) for remote ones.
"""

import json
import logging
import os
import sqlite3
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clipscale.data.shards.access import Access, Opened, SourceError, digest, is_local, leaf_of, own_cache, scheme_of
from clipscale.data.shards.origins import FaultError, origin_of
from clipscale.data.shards.tar import BLOCK

log = logging.getLogger(__name__)

FILE = "clipscale-index.sqlite"
FEW = 100
"""So many shards are looked up by name; for more, all of the index is read."""
NO_FILE = ("pipe", "table")
"""Schemes of what is not a shard that could be indexed."""
SCHEMA = """CREATE TABLE IF NOT EXISTS shards (name TEXT PRIMARY KEY, size INT, stamp TEXT, samples INT, sha256 TEXT, totals TEXT,
             reason TEXT, detail TEXT, places BLOB)"""
"""The long column last: SQLite reaches those before it without reading through it."""
_COLUMNS = "name, size, stamp, samples, sha256, totals, reason, detail"


@dataclass(frozen=True)
class Entry:
    """What is known of one shard."""

    name: str
    """The last part of its path."""
    size: int
    """Bytes of the file."""
    stamp: str
    """Time of change in nanoseconds, or the remote object's version."""
    samples: int
    sha256: str | None
    """None where the headers alone were read."""
    totals: dict[str, tuple[int, int]]
    """Extension -> members and their bytes."""
    reason: str | None
    """Why the shard could not be read to its end; `samples` is what could be."""
    detail: str = ""
    places: np.ndarray | None = None
    """(samples + 1,) byte offsets; None for packed shards, and where only a summary was asked for."""


# -- where it lies -----------------------------------------------------------------------------------------------------


def folder_of(url: str) -> str:
    """The folder whose index has this shard."""
    return os.path.dirname(os.path.abspath(url)) if is_local(url) else url.rsplit("/", 1)[0]  # noqa: PTH100, PTH120 (as it is named)


def files_of(folder: str, cache: str | None) -> list[Path]:
    """Where a folder's index may lie, the nearest first: beside the shards, in `cache`, in the user's cache folder."""
    name = digest(folder) + ".sqlite"
    beside = [Path(folder) / FILE] if is_local(folder) else []
    given = [Path(cache).expanduser() / "index" / name] if cache else []
    return [*beside, *given, own_cache() / "index" / name]


def stamp_of(url: str, access: Access) -> tuple[int, str]:
    """Size and stamp of a shard as it is now. Raises OSError or SourceError."""
    if is_local(url):
        about = Path(url).stat()
        return about.st_size, str(about.st_mtime_ns)
    for attempt in range(access.retries + 1):
        try:
            return origin_of(url, access.wait_s).about()
        except FaultError as fault:
            if attempt == access.retries:
                raise SourceError("unreachable_shard", str(fault)) from fault
            time.sleep(min(0.25 * 2**attempt, 10.0))
    raise AssertionError("the last attempt returns or raises")


# -- reading it --------------------------------------------------------------------------------------------------------


def rows(path: Path, question: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """The answer to a question; nothing if there is no such file. A damaged file is said to be so, and ignored."""
    if not path.is_file():
        return []
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as base:
            return base.execute(question, values).fetchall()
    except sqlite3.Error as error:
        log.warning("%s: the index cannot be read (%s); going on without it", path, error)
        return []


def _entry(row: tuple[Any, ...], places: np.ndarray | None = None) -> Entry:
    name, size, stamp, samples, sha256, totals, reason, detail = row
    members = {extension: (int(n), int(b)) for extension, (n, b) in json.loads(totals).items()}
    return Entry(name, size, stamp, samples, sha256, members, reason, detail, places)


def known(urls: Iterable[str], cache: str | None = None) -> dict[str, list[Entry]]:
    """What the indexes say of these shards, without places and whether or not it still holds; the nearest index first."""
    wanted: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for url in urls:
        if scheme_of(url) not in NO_FILE:
            wanted[folder_of(url)][leaf_of(url)].append(url)
    found: dict[str, list[Entry]] = defaultdict(list)
    for folder, leaves in wanted.items():
        for path in files_of(folder, cache):
            question, names = f"SELECT {_COLUMNS} FROM shards", list(leaves) if len(leaves) < FEW else []
            if names:
                question += f" WHERE name IN ({', '.join('?' * len(names))})"
            for row in rows(path, question, names):
                for url in leaves.get(row[0], ()):
                    found[url].append(_entry(row))
    return dict(found)


def matching(entries: Sequence[Entry], size: int, stamp: str) -> Entry | None:
    """The nearest index's entry of this very state of a shard. One beside shards that have changed must not hide a newer one elsewhere."""
    return next((entry for entry in entries if (entry.size, entry.stamp) == (size, stamp)), None)


def current(urls: Sequence[str], cache: str | None = None) -> tuple[dict[str, Entry], list[str]]:
    """The entries that still hold, and the shards that have changed since theirs were made.

    Remote shards are not asked for here, which would take a request each; whoever opens one compares (`places`).
    """
    entries = known(urls, cache)

    def holds(url: str) -> Entry | None:
        if not is_local(url):
            return entries[url][0]
        try:
            about = Path(url).stat()
        except OSError:
            return None
        return matching(entries[url], about.st_size, str(about.st_mtime_ns))

    with ThreadPoolExecutor(16) as pool:  # waits on the file system, seldom on the processor
        found = dict(zip(entries, pool.map(holds, entries)))
    return {url: entry for url, entry in found.items() if entry}, [url for url, entry in found.items() if not entry]


def places(url: str, opened: Opened, cache: str | None = None) -> np.ndarray | None:
    """Where the samples of an opened shard begin, (samples + 1,) int64, or None where no index is of this very state of it."""
    stale = False
    for path in files_of(folder_of(url), cache):
        for size, stamp, packed in rows(path, "SELECT size, stamp, places FROM shards WHERE name = ?", (leaf_of(url),)):
            if (size, stamp) == (opened.size, opened.stamp):
                return None if packed is None else _unpack(packed)
            stale = True
    if stale:
        log.warning("%s has changed since it was indexed; it is read without its index", url)
    return None


def pack(offsets: Sequence[int]) -> bytes:
    """Places as they are stored."""
    blocks = np.asarray(offsets, dtype=np.int64) // BLOCK
    return zlib.compress(np.diff(blocks, prepend=0).astype("<u4").tobytes(), 6)


def _unpack(packed: bytes) -> np.ndarray:
    return np.cumsum(np.frombuffer(zlib.decompress(packed), dtype="<u4").astype(np.int64)) * BLOCK
