"""The index of a folder of shards: for each its samples, their offsets, its size and a checksum.

One SQLite file per folder, replaced as a whole, so readers never see a half-written one. An entry holds only for the
file it was made from: same size and time of change for a local shard, same size and version (ETag) for a remote one.
Offsets take two to four bytes a sample.
"""

import json
import logging
import os
import sqlite3
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clipscale.common.errors import UserError
from clipscale.common.files import parse_json
from clipscale.common.terminal import printable
from clipscale.data.shards.access import (
    DIRECT,
    Opened,
    ReadContext,
    digest,
    is_local,
    is_text,
    leaf_of,
    scheme_of,
    user_cache,
)
from clipscale.data.shards.index_file import query
from clipscale.data.shards.remote_object import Retry, State, remote_object
from clipscale.data.shards.tar import BLOCK

log = logging.getLogger(__name__)

FILE = "clipscale-index.sqlite"
FEW = 100
"""Up to so many shards are looked up by name; for more, the whole index is read."""
MOST_SAMPLES = 1 << 24
"""Samples of a shard whose offsets are used: they take 8 bytes each in memory, and zlib packs zeros a thousand to one."""
NO_FILE = ("pipe", "table")
"""Schemes whose addresses are not files and have no index."""
_COLUMNS = "name, size, stamp, samples, sha256, totals, reason, detail"


@dataclass(frozen=True)
class Entry:
    """The record of one shard."""

    name: str
    """The last part of its path."""
    size: int
    """Bytes of the file."""
    version: str
    """Time of change in nanoseconds, or the remote object's version."""
    samples: int
    sha256: str | None
    """None if only the headers were read."""
    totals: dict[str, tuple[int, int]]
    """Extension -> members and their bytes."""
    reason: str | None
    """Why the shard could not be read to its end; `samples` counts what could be read."""
    detail: str = ""
    offsets: np.ndarray | None = None
    """(samples + 1,) byte offsets; None for packed shards, and in the entries that `known` returns."""


def folder_of(url: str) -> str:
    """The folder whose index has this shard."""
    return os.path.dirname(os.path.abspath(url)) if is_local(url) else url.rsplit("/", 1)[0]  # noqa: PTH100, PTH120 (as it is named)


def index_paths(folder: str, cache: str | None) -> list[Path]:
    """Where a folder's index may be, the preferred place first: beside the shards, `cache`, the user's cache."""
    name = digest(folder) + ".sqlite"
    beside = [Path(folder) / FILE] if is_local(folder) else []
    given = [Path(cache).expanduser() / "index" / name] if cache else []
    return [*beside, *given, user_cache() / "index" / name]


def writable_path(folder: str, cache: str | None) -> Path:
    """Where to write a folder's index: beside the shards if `cache` is not set and the folder is writable, else in the
    cache. Raises UserError.
    """
    paths = index_paths(folder, cache)
    if is_local(folder) and cache is None and os.access(folder, os.W_OK):
        return paths[0]
    path = paths[1] if is_local(folder) else paths[0]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cache={path.parent}: cannot be written ({error.strerror}); choose another") from error
    return path


def state_of(url: str) -> State:
    """Size and version of a shard now. Raises OSError or SourceError."""
    if is_local(url):
        about = Path(url).stat()
        return about.st_size, str(about.st_mtime_ns)
    return Retry(ReadContext()).stat(remote_object(url, DIRECT.wait_s))


def known(urls: Iterable[str], cache: str | None = None) -> dict[str, list[Entry]]:
    """The shards' entries in all indexes, in order of precedence, without offsets, whether they still hold or not."""
    wanted: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for url in urls:
        if scheme_of(url) not in NO_FILE and is_text(leaf_of(url)):
            wanted[folder_of(url)][leaf_of(url)].append(url)
    found: dict[str, list[Entry]] = defaultdict(list)
    for folder, leaves in wanted.items():
        for path in index_paths(folder, cache):
            question, names = f"SELECT {_COLUMNS} FROM shards", list(leaves) if len(leaves) < FEW else []
            if names:
                question += f" WHERE name IN ({', '.join('?' * len(names))})"
            for row in query(path, question, names):
                if entry := _entry(row):
                    for url in leaves.get(entry.name, ()):
                        found[url].append(entry)
    return dict(found)


def _entry(row: Sequence[Any]) -> Entry | None:
    """The entry in a row of an index; None if it is not what `write` writes."""
    name, size, version, samples, sha256, totals, reason, detail = row
    texts = all(isinstance(value, str) for value in (name, version, totals, detail, sha256 or "", reason or ""))
    if not texts or not all(isinstance(value, int) and value >= 0 for value in (size, samples)):
        return None
    try:
        members = {str(extension): (int(n), int(b)) for extension, (n, b) in parse_json(totals).items()}
    except (ValueError, TypeError, AttributeError):
        return None
    return Entry(name, size, version, samples, sha256, members, reason, detail)


def matching(entries: Sequence[Entry], state: State) -> Entry | None:
    """The first entry for this state of a shard: an outdated index must not hide a newer one in the cache."""
    return next((entry for entry in entries if (entry.size, entry.version) == state), None)


def current(urls: Sequence[str], cache: str | None = None) -> tuple[dict[str, Entry], list[str]]:
    """The entries that still hold, and the shards that have changed since theirs were made.

    Remote shards are assumed unchanged, since asking takes a request each; `sample_offsets` compares them when they are
    opened.
    """
    entries = known(urls, cache)

    def holds(url: str) -> Entry | None:
        try:
            return matching(entries[url], state_of(url)) if is_local(url) else entries[url][0]
        except OSError:
            return None

    with ThreadPoolExecutor(16) as pool:  # waits on the file system, seldom on the processor
        found = dict(zip(entries, pool.map(holds, entries)))
    return {url: entry for url, entry in found.items() if entry}, [url for url, entry in found.items() if not entry]


def sample_offsets(url: str, opened: Opened, cache: str | None = None) -> np.ndarray | None:
    """Where an opened shard's samples begin, (samples + 1,) int64; None if no index has an entry of its state."""
    stale = False
    question = "SELECT size, stamp, places FROM shards WHERE name = ?"
    for path in index_paths(folder_of(url), cache) if is_text(leaf_of(url)) else ():
        for size, version, packed in query(path, question, [leaf_of(url)]):
            if (size, version) == (opened.size, opened.version):
                try:
                    return None if packed is None else unpack(packed, size)
                except (ValueError, TypeError, zlib.error) as error:
                    log.warning("%s: its index is damaged (%s); it is read without its index", url, error)
                    return None
            stale = True
    if stale:
        log.warning("%s has changed since it was indexed; it is read without its index", url)
    return None


def pack(offsets: np.ndarray) -> bytes:
    """Offsets as the index stores them."""
    return zlib.compress(np.diff(offsets // BLOCK, prepend=0).astype("<u4").tobytes(), 6)


def unpack(packed: bytes, size: int = sys.maxsize) -> np.ndarray:
    """The offsets that `pack` packed, of a shard of `size` bytes. Raises zlib.error, and ValueError for what it cannot have."""
    most = 4 * min(size // BLOCK + 2, MOST_SAMPLES)
    data = zlib.decompressobj().decompress(packed, most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most // 4} offsets")
    offsets = np.cumsum(np.frombuffer(data, dtype="<u4").astype(np.int64)) * BLOCK
    if not len(offsets) or offsets[-1] > size:
        raise ValueError(f"its offsets end beyond the shard's {size} bytes")
    return offsets


STATES = "SELECT name, size, stamp, sha256 FROM shards"
"""What decides whether an entry still holds."""


def write(base: sqlite3.Connection, entry: Entry) -> None:
    """Add or replace an entry."""
    found = (entry.name, entry.size, entry.version, entry.samples, entry.sha256, json.dumps(entry.totals))
    more = (entry.reason, printable(entry.detail), None if entry.offsets is None else pack(entry.offsets))
    base.execute("INSERT OR REPLACE INTO shards VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*found, *more))
