"""The index of a folder of shards: each shard's number of samples, their offsets, its size and version.

One SQLite file per folder. An entry is valid while the shard has the same size and the same version: a local file's
time of change, a remote object's ETag. Offsets take two to four bytes a sample.
"""

import logging
import os
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import starmap
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from clipscale.common.errors import UserError
from clipscale.common.files import user_cache
from clipscale.common.process_pool import pool_map, spawned_pool
from clipscale.data.addresses import basename, dirname, is_local
from clipscale.data.hashing import digest, utf8
from clipscale.data.shards.reader import ReadFailure, read_shard
from clipscale.data.shards.requests import ObjectState, SourceError
from clipscale.data.shards.store import Store, local_state
from clipscale.data.shards.subset import Subset
from clipscale.data.shards.tar import BLOCK_BYTES

log = logging.getLogger(__name__)
T = TypeVar("T")

# The index in a folder of shards.
INDEX_FILE = "clipscale-index.sqlite"
_COLUMNS = "name, size, version, samples, reason, detail"
_SCHEMA = """CREATE TABLE IF NOT EXISTS shards (name TEXT PRIMARY KEY, size INT, version TEXT, samples INT,
             reason TEXT, detail TEXT, {last})"""
# The last column of a folder's index.
_OFFSETS = "offsets BLOB"
# The last column of a subset's index.
_WEIGHT = "weight REAL"
# A copy of the short columns: without it SQLite reads a page per shard, among gigabytes of offsets.
_LOOKUP = f"CREATE INDEX IF NOT EXISTS states ON shards ({_COLUMNS})"
# The fault of a shard that has changed since it was indexed, and is read without its index.
CHANGED_SHARD = "changed_shard"
# Threads that ask a file system for the states of files.
THREADS = 16
# Fewer shards than this are scanned in one process: starting others takes longer.
MIN_PARALLEL_SHARDS = 16
# Stands after the version in an entry made by the present rule of what a sample is. The rule before it took repeated
# members of a key for one sample, and ignored links.
RULE_MARK = " #2"


class IndexEntry(NamedTuple):
    """An index's entry for one shard."""

    # The last part of its path, by `utf8`.
    name: str
    # Bytes of the file.
    size: int
    # Time of change in nanoseconds, or the remote object's version; then RULE_MARK.
    version: str
    samples: int
    # Why the shard could not be read to its end; `samples` counts what could be read.
    reason: str | None
    detail: str = ""
    # For a subset: the sum of the samples' weights, which is their number in an average epoch.
    weight: float | None = None
    # Its samples' offsets, by `pack`; None for subsets, and in the entries of `read_entries`.
    offsets: bytes | None = None

    @property
    def state(self) -> ObjectState:
        """The shard's state when it was indexed."""
        return ObjectState(self.size, self.version.removesuffix(RULE_MARK))

    @property
    def expected_samples(self) -> float:
        """Its samples in an average epoch."""
        return self.samples if self.weight is None else self.weight


def name_in_index(url: str) -> str:
    return utf8(basename(url))


def folder_of_shard(url: str) -> str:
    return str(Path(url).absolute().parent) if is_local(url) else dirname(url).removesuffix("/")


def index_paths(folder: str, subset: Subset | None = None) -> list[Path]:
    """Places where a folder's index may be, or a subset's: in the folder if it is local, and in the user's cache."""
    suffix = f"-{subset.name}.sqlite" if subset else ".sqlite"
    cached = user_cache() / "index" / f"{digest(folder)}{suffix}"
    return [Path(folder) / INDEX_FILE.replace(".sqlite", suffix), cached] if is_local(folder) else [cached]


def query(path: Path, question: str, values: Sequence[object] = ()) -> Iterator[tuple[Any, ...]]:
    """The rows of an SQL query; none without the file. At damage the rows end, with a warning."""
    if not path.is_file():
        return
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as base:
            yield from base.execute(question, values)
    except sqlite3.Error as error:
        log.warning("%s: the index cannot be read (%s); continuing without it", path, error)


class IndexedShards(NamedTuple):
    """The indexes' entries for shards."""

    # Valid entries, by the shards' addresses.
    entries: dict[str, IndexEntry]
    # Shards that have changed since they were indexed.
    stale: list[str]

    @property
    def by_earlier_rule(self) -> list[str]:
        """Shards that an earlier version indexed, by another rule."""
        return [url for url, entry in self.entries.items() if not entry.version.endswith(RULE_MARK)]


def read_entries(urls: Sequence[str], subset: Subset | None = None) -> IndexedShards:
    """Read the indexes' entries for these shards.

    Remote shards are assumed unchanged, since asking takes a request each; `sample_offsets` checks them when they are
    opened. An outdated entry in the folder does not hide a valid one in the cache.
    """
    entries: dict[str, IndexEntry] = {}
    changed: dict[str, None] = {}
    folders: dict[str, dict[str, str]] = defaultdict(dict)
    columns = f"{_COLUMNS}, weight" if subset else _COLUMNS
    for url in urls:
        folders[dirname(url)][name_in_index(url)] = url
    for shards in folders.values():
        first = next(iter(shards.values()))
        for path in index_paths(folder_of_shard(first), subset):
            rows = [row for row in query(path, f"SELECT {columns} FROM shards") if row[0] in shards]
            indexed = [shards[row[0]] for row in rows]
            states = _states(indexed) if is_local(first) else [None] * len(indexed)
            for url, entry, state in zip(indexed, starmap(IndexEntry, rows), states, strict=True):
                if state == entry.state or not is_local(first):
                    entries.setdefault(url, entry)
                else:
                    changed[url] = None
    return IndexedShards(entries, [url for url in changed if url not in entries])


def _states(paths: Sequence[str]) -> list[ObjectState | None]:
    """The states of files; None for one that does not exist.

    Threads help on network file systems. Each takes many files: on a local disk they only wait for each other.
    """
    if not paths:
        return []
    size = -(-len(paths) // THREADS)
    with ThreadPool(-(-len(paths) // size)) as pool:  # a signal leaves it at once, also where a file system is silent
        return pool.map(_state, paths, chunksize=size)


def _state(path: str) -> ObjectState | None:
    try:
        return local_state(path)
    except OSError:
        return None


def sample_offsets(
    url: str, state: ObjectState, count_fault: Callable[[str], None] = lambda fault: None
) -> np.ndarray | None:
    """An opened shard's sample offsets, (samples + 1,) int64; None if no index has an entry of its state.

    `count_fault` is called with CHANGED_SHARD if the shard has changed since it was indexed.
    """
    is_stale = False
    question = "SELECT offsets, size, version FROM shards WHERE name = ?"
    for path in index_paths(folder_of_shard(url)):
        for packed, size, version in query(path, question, [name_in_index(url)]):
            if ObjectState(size, version.removesuffix(RULE_MARK)) == state:
                return None if packed is None else unpack(packed)
            is_stale = True
    if is_stale:
        count_fault(CHANGED_SHARD)
    return None


def pack(offsets: Sequence[int]) -> bytes:
    """Offsets, multiples of a block, as an index has them: their differences, compressed."""
    blocks = np.array(offsets, dtype=np.int64) // BLOCK_BYTES
    return zlib.compress(np.diff(blocks, prepend=0).astype("<u4").tobytes(), 6)


def unpack(packed: bytes) -> np.ndarray:
    """The offsets of `pack`, int64."""
    return np.cumsum(np.frombuffer(zlib.decompress(packed), dtype="<u4").astype(np.int64)) * BLOCK_BYTES


@contextmanager
def _writing(path: Path, final_column: str = _OFFSETS) -> Iterator[sqlite3.Connection]:
    """Opens or creates an index with this final column. Each statement is its own transaction.

    Raises UserError if the index cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as base:
            base.execute(_SCHEMA.format(last=final_column))
            base.execute(_LOOKUP)
            yield base
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"{path}: the index cannot be written ({error}); remove it, or make room") from error


# ---- scanning ----


def scan_shard(url: str, subset: Subset | None = None) -> IndexEntry:
    """The index entry of a shard, or of its samples in a subset, from its headers.

    A damaged shard's entry has a `reason`. Raises OSError or SourceError if the shard cannot be reached.
    """
    state = Store().state(url)
    failure = ReadFailure()
    offsets = [0]
    link_bytes = 0
    weight = 0.0
    for raw in read_shard(url, failure, lambda _: False, {}, subset=subset):
        offsets.append(offsets[-1] + raw.num_bytes)
        link_bytes += raw.link_bytes
        weight += 0 if raw.repeat else raw.keep_probability  # the first copy has the sample's weight
    error = failure.error
    if isinstance(error, SourceError) or (isinstance(error, OSError) and error.errno):
        raise error  # a failure of the storage, which may pass
    samples = len(offsets) - 1
    # With links every header is needed: only the linked files say how many bytes a sample has.
    has_offsets = samples > 0 and subset is None and not link_bytes
    packed = pack(offsets) if has_offsets else None
    return IndexEntry(
        name=name_in_index(url),
        size=state.size,
        version=state.version + RULE_MARK,
        samples=samples,
        reason=failure.reason,
        detail=utf8(failure.detail),
        weight=weight if subset else None,
        offsets=packed,
    )


# A shard's new entry, the reason why it could not be opened, or None if its old entry is still valid.
Outcome = IndexEntry | str | None


def update_indexes(
    urls: Sequence[str], subset: Subset | None = None, *, in_folder: bool = True, workers: int = 1
) -> Iterator[tuple[str, Outcome]]:
    """Bring the indexes of these shards' folders up to date: in the folder (`in_folder`), or in the user's cache if it
    is remote or read-only.

    Yields each shard's outcome. Shards with a valid entry are skipped. Entries are written one by one, so that a killed
    command can continue. Raises UserError.
    """
    folders = defaultdict(list)
    for url in urls:
        folders[folder_of_shard(url)].append(url)
    for folder, shards in folders.items():
        path = index_paths(folder, subset)[0 if in_folder and os.access(folder, os.W_OK) else -1]
        states = {name: state for name, *state in query(path, "SELECT name, size, version FROM shards")}
        old = [states.get(name_in_index(url)) for url in shards]
        with _writing(path, _WEIGHT if subset else _OFFSETS) as base:
            for url, outcome in zip(shards, map_shards(partial(scan_changed, subset), workers, shards, old)):
                if isinstance(outcome, IndexEntry):
                    value = outcome.weight if subset else outcome.offsets
                    base.execute("INSERT OR REPLACE INTO shards VALUES (?, ?, ?, ?, ?, ?, ?)", (*outcome[:6], value))
                yield url, outcome


def scan_changed(subset: Subset | None, url: str, old: list[object] | None = None) -> Outcome:
    """Scan a shard, unless it still has the state of its old entry (size and version)."""
    try:
        size, version = Store().state(url)
        return None if [size, version + RULE_MARK] == old else scan_shard(url, subset)
    except (OSError, SourceError) as error:
        return str(error)


def map_shards(work: Callable[..., T], workers: int, urls: Sequence[str], *others: Sequence[object]) -> Iterator[T]:
    """The result of `work` on each shard, in order, computed by `workers` processes.

    This process computes them if there are fewer than MIN_PARALLEL_SHARDS shards. `others`: further arguments, one for
    each shard.
    """
    if workers < 2 or len(urls) < MIN_PARALLEL_SHARDS:
        yield from map(work, urls, *others)
        return
    with spawned_pool(min(workers, len(urls))) as pool:
        yield from pool_map(pool, work, urls, *others)
