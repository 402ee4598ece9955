"""The index of a folder of shards: how many samples each holds, where they begin, its size, and a checksum.

One SQLite file per folder, replaced as a whole: readers never see one half written. A sample's place is the offset of its first header;
what lies up to the next sample's is its members, so a read begins at any sample and asks for no header in between. Two to four bytes a
sample. An entry counts only for the very file it was made from: size and time of change for local shards, size and version
(ETag) for remote ones.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import sqlite3
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from clipscale.data.archive import BLOCK, Census, Metered, ReadProblem, read_shard, unpacked
from clipscale.data.origins import FaultError, origin_of
from clipscale.data.sources import DIRECT, Access, Opened, SourceError, Store, is_local, leaf_of, own_cache, scheme_of
from clipscale.errors import UserError

log = logging.getLogger(__name__)

FILE = "clipscale-index.sqlite"
FEW = 100
"""So many shards are looked up by name; for more, all of the index is read."""
NO_FILE = ("pipe", "table")
"""Schemes of what is not a shard that could be indexed."""
SERIAL_BYTES = 256 << 20
"""Shards of less than this together are read by one process; starting others would take longer."""
_SCHEMA = """CREATE TABLE IF NOT EXISTS shards (name TEXT PRIMARY KEY, size INT, stamp TEXT, samples INT, sha256 TEXT, totals TEXT,
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
    name = hashlib.blake2b(folder.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() + ".sqlite"
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


def _rows(path: Path, question: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
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
            for row in _rows(path, question, names):
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
        for size, stamp, packed in _rows(
            path, "SELECT size, stamp, places FROM shards WHERE name = ?", (leaf_of(url),)
        ):
            if (size, stamp) == (opened.size, opened.stamp):
                return None if packed is None else _unpack(packed)
            stale = True
    if stale:
        log.warning("%s has changed since it was indexed; it is read without its index", url)
    return None


def _pack(offsets: Sequence[int]) -> bytes:
    blocks = np.asarray(offsets, dtype=np.int64) // BLOCK
    return zlib.compress(np.diff(blocks, prepend=0).astype("<u4").tobytes(), 6)


def _unpack(packed: bytes) -> np.ndarray:
    return np.cumsum(np.frombuffer(zlib.decompress(packed), dtype="<u4").astype(np.int64)) * BLOCK


# -- making it ---------------------------------------------------------------------------------------------------------


class HashingStore(Store):
    """A store whose streams are hashed."""

    def __init__(self, access: Access) -> None:
        super().__init__(access)
        self.digest = hashlib.sha256()

    def open(self, url: str) -> Opened:
        opened = super().open(url)
        return opened._replace(stream=Metered(opened.stream, self.digest))


def survey(url: str, access: Access = DIRECT, checksum: bool = True) -> Entry:
    """Read one shard: all of it for the checksum, its headers alone without. Damage is noted in the entry.

    Raises OSError or SourceError if it cannot be looked at.
    """
    size, stamp = stamp_of(url, access)
    census, problem = Census(), ReadProblem()
    store = HashingStore(access) if checksum else Store(access)
    samples = sum(1 for _ in read_shard(url, problem, lambda _: False, store=store, census=census))
    with closing(Store(access).open(url).stream) as source:
        packed = unpacked(source) is not source if size else True
    return Entry(
        name=leaf_of(url),
        size=size,
        stamp=stamp,
        samples=samples,
        sha256=store.digest.hexdigest() if isinstance(store, HashingStore) else None,
        totals={extension: (n, census.sizes[extension]) for extension, n in sorted(census.members.items())},
        reason=problem.reason,
        detail=problem.detail,
        places=None if packed or not samples else np.asarray(census.starts[: samples + 1], dtype=np.int64),
    )


def place_for(folder: str, cache: str | None) -> Path:
    """Where a folder's index is written: beside the shards if that can be, else in the cache. Raises UserError."""
    files = files_of(folder, cache)
    if is_local(folder) and cache is None and os.access(folder, os.W_OK):
        return files[0]
    path = files[1] if is_local(folder) else files[0]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cache={path.parent}: cannot be written ({error.strerror}); choose another with cache="
        ) from error
    return path


@dataclass
class Tally:
    """What `update` did."""

    read: int = 0
    kept: int = 0
    failed: dict[str, str] | None = None
    """Shards that could not be looked at, and why."""


def update(
    urls: Sequence[str],
    *,
    place: Callable[[str], Path],
    access: Access = DIRECT,
    checksum: bool = True,
    workers: int = 1,
    force: bool = False,
    done: Callable[[str, int, Entry | None], None] = lambda url, size, entry: None,
) -> Tally:
    """Bring the indexes of these shards' folders up to date; `place` says where a folder's lies.

    Shards whose entry still holds are skipped. Every file is written beside its place and renamed at the end; what a killed run had done is
    kept there and taken up by the next. `done` is called after every shard: its entry, or None if it was skipped or failed.
    """
    tally = Tally(failed={})
    assert tally.failed is not None
    folders: dict[str, list[str]] = defaultdict(list)
    for url in urls:
        folders[folder_of(url)].append(url)
    for folder, shards in folders.items():
        with ThreadPoolExecutor(16) as pool:
            stamps = dict(zip(shards, pool.map(partial(_stamp_or_error, access=access), shards)))
        path = place(folder)
        todo = {}
        held = _held(_rows(path, _HELD)) if not force else {}
        for url, now in stamps.items():
            if isinstance(now, str):
                tally.failed[url] = now
                done(url, 0, None)
            elif _holds(held.get(leaf_of(url)), now, checksum):
                tally.kept += 1
                done(url, now[0], None)
            else:
                todo[url] = now
        if not todo:
            continue
        with _draft(path) as base:
            if not force:  # another process may have done some while we waited for our turn, or a killed one before
                held = _held(base.execute(_HELD))
                for url in [url for url, now in todo.items() if _holds(held.get(leaf_of(url)), now, checksum)]:
                    tally.kept += 1
                    done(url, todo.pop(url)[0], None)
            for url, size, entry in _surveyed([(url, now[0]) for url, now in todo.items()], access, checksum, workers):
                if isinstance(entry, str):
                    tally.failed[url] = entry
                    done(url, size, None)
                    continue
                _write(base, entry)
                tally.read += 1
                done(url, size, entry)
    return tally


_HELD = "SELECT name, size, stamp, sha256 FROM shards"


def _held(rows: Iterable[tuple[Any, ...]]) -> dict[str, tuple[int, str, str | None]]:
    return {name: (size, stamp, sha256) for name, size, stamp, sha256 in rows}


def _holds(held: tuple[int, str, str | None] | None, now: tuple[int, str], checksum: bool) -> bool:
    return held is not None and held[:2] == now and (held[2] is not None or not checksum)


def _write(base: sqlite3.Connection, entry: Entry) -> None:
    base.execute(
        "INSERT OR REPLACE INTO shards VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            entry.name,
            entry.size,
            entry.stamp,
            entry.samples,
            entry.sha256,
            json.dumps(entry.totals),
            entry.reason,
            entry.detail,
            None if entry.places is None else _pack(entry.places.tolist()),
        ),
    )


def _stamp_or_error(url: str, access: Access) -> tuple[int, str] | str:
    try:
        return stamp_of(url, access)
    except (OSError, SourceError) as error:
        return str(error)


def _survey_or_error(url: str, access: Access, checksum: bool) -> Entry | str:
    try:
        return survey(url, access, checksum)
    except (OSError, SourceError) as error:
        return str(error)


def _surveyed(
    todo: Sequence[tuple[str, int]], access: Access, checksum: bool, workers: int
) -> Iterator[tuple[str, int, Entry | str]]:
    if workers < 2 or len(todo) < 2 or sum(size for _, size in todo) < SERIAL_BYTES:
        for url, size in todo:
            yield url, size, _survey_or_error(url, access, checksum)
        return
    # spawn: the caller may hold threads and locks
    with ProcessPoolExecutor(min(workers, len(todo)), mp_context=get_context("spawn")) as pool:
        waiting: dict[Future[Entry | str], tuple[str, int]] = {
            pool.submit(_survey_or_error, url, access, checksum): (url, size) for url, size in todo
        }
        try:
            for future in as_completed(waiting):
                yield *waiting[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _draft(path: Path) -> Iterator[sqlite3.Connection]:
    """A copy of an index to write to, put in its place at the end. Processes take turns. Raises UserError if it cannot be written."""
    draft = path.with_name(f".{path.name}.draft")
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
            if path.is_file() and not draft.is_file():
                shutil.copyfile(path, draft)
            with closing(_connected(draft)) as base:
                yield base
            draft.replace(path)
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"{path}: cannot be written ({error}); choose another place with cache=") from error


def _connected(draft: Path) -> sqlite3.Connection:
    """An open draft, begun anew where the one found is damaged: whatever it said can be read again."""
    for _ in range(2):
        base = sqlite3.connect(draft, isolation_level=None)
        try:
            base.execute(_SCHEMA)
            base.execute(_HELD).fetchall()
            return base
        except sqlite3.DatabaseError as error:
            base.close()
            log.warning("%s: damaged (%s); indexing anew", draft, error)
            draft.unlink()
    raise sqlite3.DatabaseError("cannot be begun anew")
