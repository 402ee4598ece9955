"""Making the index of a folder of shards: every shard read once, by several processes; what a killed run has done is kept."""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from clipscale.data.shards.access import DIRECT, Access, Opened, SourceError, is_local, leaf_of
from clipscale.data.shards.index import SCHEMA, Entry, files_of, folder_of, pack, rows, stamp_of
from clipscale.data.shards.reader import Census, ReadProblem, read_shard
from clipscale.data.shards.store import Store
from clipscale.data.shards.tar import Metered, unpacked
from clipscale.errors import UserError

log = logging.getLogger(__name__)
T = TypeVar("T")

SERIAL_BYTES = 256 << 20
"""Shards of less than this together are read by one process; starting others would take longer."""


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
        held = _held(rows(path, _HELD)) if not force else {}
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
            work = partial(_survey_or_error, access=access, checksum=checksum)
            few = sum(size for size, _ in todo.values()) < SERIAL_BYTES
            for url, entry in as_they_come(work, list(todo), 1 if few else workers):
                size = todo[url][0]
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
            None if entry.places is None else pack(entry.places.tolist()),
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


def as_they_come(work: Callable[[str], T], urls: Sequence[str], workers: int) -> Iterator[tuple[str, T]]:
    """Each shard and what `work` makes of it, by so many processes, the first to be ready first; a single one is this process."""
    if workers < 2 or len(urls) < 2:
        yield from ((url, work(url)) for url in urls)
        return
    # spawn: the caller may hold threads and locks
    with ProcessPoolExecutor(min(workers, len(urls)), mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(work, url): url for url in urls}
        try:
            for future in as_completed(waiting):
                yield waiting.pop(future), future.result()
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
            base.execute(SCHEMA)
            base.execute(_HELD).fetchall()
            return base
        except sqlite3.DatabaseError as error:
            base.close()
            log.warning("%s: damaged (%s); indexing anew", draft, error)
            draft.unlink()
    raise sqlite3.DatabaseError("cannot be begun anew")
