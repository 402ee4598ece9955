"""The index of a folder of shards: for each its samples, their offsets, its size and a checksum.

One SQLite file per folder, replaced as a whole, so readers never see a half-written one. An entry holds only for the
file it was made from: same size and time of change for a local shard, same size and version (ETag) for a remote one.
Offsets take two to four bytes a sample.
"""

import fcntl
import json
import logging
import os
import shutil
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clipscale.data.shards.access import Access, Opened, ReadContext, digest, is_local, leaf_of, scheme_of, user_cache
from clipscale.data.shards.remote_object import Retry, remote_object
from clipscale.data.shards.tar import BLOCK
from clipscale.errors import UserError

log = logging.getLogger(__name__)

FILE = "clipscale-index.sqlite"
FEW = 100
"""Up to so many shards are looked up by name; for more, the whole index is read."""
NO_FILE = ("pipe", "table")
"""Schemes whose addresses are not files and have no index."""
SCHEMA = """CREATE TABLE IF NOT EXISTS shards (name TEXT PRIMARY KEY, size INT, stamp TEXT, samples INT,
            sha256 TEXT, totals TEXT, reason TEXT, detail TEXT, places BLOB)"""
"""`stamp` is the version, `places` the offsets. The long column is last: SQLite reads the others without it."""
_COLUMNS = "name, size, stamp, samples, sha256, totals, reason, detail"
State = tuple[int, str]
"""Size and version of a shard: they identify its content."""


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


# -- where it is -------------------------------------------------------------------------------------------------------


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
    cache.

    Raises UserError.
    """
    paths = index_paths(folder, cache)
    if is_local(folder) and cache is None and os.access(folder, os.W_OK):
        return paths[0]
    path = paths[1] if is_local(folder) else paths[0]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cache={path.parent}: cannot be written ({error.strerror}); choose another with cache="
        ) from error
    return path


def state_of(url: str, access: Access) -> State:
    """Size and version of a shard now. Raises OSError or SourceError."""
    if is_local(url):
        about = Path(url).stat()
        return about.st_size, str(about.st_mtime_ns)
    return Retry(ReadContext(access)).call(remote_object(url, access.wait_s).stat)


# -- reading it --------------------------------------------------------------------------------------------------------


def query(path: Path, question: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """The rows that answer an SQL query; none if there is no such file. Warns of a damaged file and ignores it."""
    if not path.is_file():
        return []
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as base:
            return base.execute(question, values).fetchall()
    except sqlite3.Error as error:
        log.warning("%s: the index cannot be read (%s); going on without it", path, error)
        return []


def known(urls: Iterable[str], cache: str | None = None) -> dict[str, list[Entry]]:
    """The shards' entries in all indexes, in order of precedence, without offsets, whether they still hold or not."""
    wanted: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for url in urls:
        if scheme_of(url) not in NO_FILE:
            wanted[folder_of(url)][leaf_of(url)].append(url)
    found: dict[str, list[Entry]] = defaultdict(list)
    for folder, leaves in wanted.items():
        for path in index_paths(folder, cache):
            question, names = f"SELECT {_COLUMNS} FROM shards", list(leaves) if len(leaves) < FEW else []
            if names:
                question += f" WHERE name IN ({', '.join('?' * len(names))})"
            for name, size, version, samples, sha256, totals, *damage in query(path, question, names):
                members = {extension: (int(n), int(b)) for extension, (n, b) in json.loads(totals).items()}
                for url in leaves.get(name, ()):
                    found[url].append(Entry(name, size, version, samples, sha256, members, *damage))
    return dict(found)


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
            return matching(entries[url], state_of(url, Access())) if is_local(url) else entries[url][0]
        except OSError:
            return None

    with ThreadPoolExecutor(16) as pool:  # waits on the file system, seldom on the processor
        found = dict(zip(entries, pool.map(holds, entries)))
    return {url: entry for url, entry in found.items() if entry}, [url for url, entry in found.items() if not entry]


def sample_offsets(url: str, opened: Opened, cache: str | None = None) -> np.ndarray | None:
    """Where an opened shard's samples begin, (samples + 1,) int64; None if no index has an entry of its state."""
    stale = False
    for path in index_paths(folder_of(url), cache):
        for size, version, packed in query(
            path, "SELECT size, stamp, places FROM shards WHERE name = ?", [leaf_of(url)]
        ):
            if (size, version) == (opened.size, opened.version):
                return None if packed is None else unpack(packed)
            stale = True
    if stale:
        log.warning("%s has changed since it was indexed; it is read without its index", url)
    return None


def pack(offsets: np.ndarray) -> bytes:
    """Offsets as the index stores them."""
    return zlib.compress(np.diff(offsets // BLOCK, prepend=0).astype("<u4").tobytes(), 6)


def unpack(packed: bytes) -> np.ndarray:
    """The offsets that `pack` packed."""
    return np.cumsum(np.frombuffer(zlib.decompress(packed), dtype="<u4").astype(np.int64)) * BLOCK


# -- writing it --------------------------------------------------------------------------------------------------------

STATES = "SELECT name, size, stamp, sha256 FROM shards"
"""What decides whether an entry still holds."""


def write(base: sqlite3.Connection, entry: Entry) -> None:
    """Add or replace an entry."""
    found = (entry.name, entry.size, entry.version, entry.samples, entry.sha256, json.dumps(entry.totals))
    offsets = None if entry.offsets is None else pack(entry.offsets)
    base.execute(
        "INSERT OR REPLACE INTO shards VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*found, entry.reason, entry.detail, offsets),
    )


@contextmanager
def draft(path: Path) -> Iterator[sqlite3.Connection]:
    """A copy of an index that replaces it at the end; an earlier run's draft is continued. Locks out other processes.

    Raises UserError if it cannot be written.
    """
    own = path.with_name(f".{path.name}.draft")
    try:
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("%s: another process is writing it; waiting", path)
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                log.warning(
                    "%s: this file system has no locks (%s); do not index the same folder twice at once", path, error
                )
            if path.is_file() and not own.is_file():
                shutil.copyfile(path, own)
            with closing(_connect(own)) as base:
                yield base
            own.replace(path)
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"{path}: cannot be written ({error}); choose another place with cache=") from error


def _connect(path: Path) -> sqlite3.Connection:
    """Open a draft, or begin it anew if it is damaged: its shards can be scanned again."""
    for _ in range(2):
        base = sqlite3.connect(path, isolation_level=None)
        try:
            base.execute(SCHEMA)
            base.execute(STATES).fetchall()
            return base
        except sqlite3.DatabaseError as error:
            base.close()
            log.warning("%s: damaged (%s); indexing anew", path, error)
            path.unlink()
    raise sqlite3.DatabaseError("cannot be begun anew")
