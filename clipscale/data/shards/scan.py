"""Scans shards, in several processes, and brings the indexes of their folders up to date; a killed run's work is kept.

Apart from index.py, which the cache uses below the reader; a scan reads shards through both.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

import numpy as np

from clipscale.data.shards.access import DIRECT, Access, Opened, SourceError, is_text, leaf_of
from clipscale.data.shards.index import STATES, Entry, folder_of, state_of, writable_path, write
from clipscale.data.shards.index_file import draft, query
from clipscale.data.shards.reader import ReadProblem, ShardStatistics, read_shard
from clipscale.data.shards.remote_object import State
from clipscale.data.shards.store import Store
from clipscale.data.shards.tar import CountedStream

T = TypeVar("T")

SERIAL_BYTES = 256 << 20
"""Shards with fewer bytes together are scanned by one process; starting others would take longer."""


class HashingStore(Store):
    """A store that hashes what is read from it."""

    def __init__(self, access: Access = DIRECT) -> None:
        super().__init__(access)
        self.hasher = hashlib.sha256()

    def open(self, url: str) -> Opened:
        opened = super().open(url)
        return opened._replace(stream=CountedStream(opened.stream, self.hasher))


def scan_shard(url: str, checksum: bool = True) -> Entry:
    """The index entry of a shard: read as a whole with `checksum`, else its headers alone. The entry notes damage.

    Raises OSError or SourceError if the shard cannot be opened.
    """
    size, version = state_of(url)
    statistics, problem = ShardStatistics(), ReadProblem()
    store = HashingStore() if checksum else Store()
    samples = sum(1 for _ in read_shard(url, problem, lambda _: False, store=store, statistics=statistics))
    sha256 = store.hasher.hexdigest() if isinstance(store, HashingStore) else None
    totals = {extension: (n, statistics.sizes[extension]) for extension, n in sorted(statistics.members.items())}
    known = samples and not statistics.packed
    offsets = np.asarray(statistics.offsets[: samples + 1], dtype=np.int64) if known else None
    return Entry(leaf_of(url), size, version, samples, sha256, totals, problem.reason, problem.detail, offsets)


@dataclass
class Update:
    """The result of `update_indexes`."""

    read: int = 0
    kept: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Shards that could not be opened, and why."""


def update_indexes(
    urls: Sequence[str],
    *,
    cache: str | None = None,
    checksum: bool = True,
    workers: int = 1,
    force: bool = False,
    done: Callable[[str, int, Entry | None], None] = lambda url, size, entry: None,
) -> Update:
    """Bring the indexes of these shards' folders up to date, at `index.writable_path`. Raises UserError.

    Skips shards whose entry still holds, unless `force`. An interrupted run leaves its index as a draft, which the next
    run continues. `done` is called after every shard with its size, and its entry unless it was skipped or failed.
    """
    result = Update()
    folders: dict[str, list[str]] = defaultdict(list)
    for url in urls:
        folders[folder_of(url)].append(url)

    def fail(url: str, size: int, why: str) -> None:
        result.failed[url] = why
        done(url, size, None)

    def skip_kept(todo: dict[str, State], rows: Iterable[tuple[Any, ...]]) -> None:
        """Take the shards out of `todo` whose entry holds, by the rows of STATES."""
        held = {name: ((size, version), sha256) for name, size, version, sha256 in rows}
        for url, state in list(todo.items()):
            indexed, sha256 = held.get(leaf_of(url), (None, None))
            if not force and indexed == state and (sha256 is not None or not checksum):
                result.kept += 1
                done(url, todo.pop(url)[0], None)

    for folder, shards in folders.items():
        with ThreadPoolExecutor(16) as pool:
            found = dict(zip(shards, pool.map(partial(_or_error, state_of), shards)))
        for url in [url for url in found if isinstance(found[url], str)]:
            fail(url, 0, found.pop(url))
        for url in [url for url in found if not is_text(leaf_of(url))]:
            fail(url, found.pop(url)[0], "its name is no UTF-8; rename it")
        path = writable_path(folder, cache)
        skip_kept(found, query(path, STATES))
        if not found:
            continue
        with draft(path) as base:
            skip_kept(found, base.execute(STATES))  # another process may have scanned some before this one got the lock
            work = partial(_or_error, scan_shard, checksum=checksum)
            small = sum(size for size, _ in found.values()) < SERIAL_BYTES
            for url, entry in map_shards(work, list(found), 1 if small else workers):
                if isinstance(entry, str):
                    fail(url, found[url][0], entry)
                    continue
                write(base, entry)
                result.read += 1
                done(url, found[url][0], entry)
    return result


def _or_error(work: Callable[..., Any], url: str, **options: Any) -> Any:
    """What `work` returns for a shard, or the message of its error."""
    try:
        return work(url, **options)
    except (OSError, SourceError) as error:
        return str(error)


def map_shards(work: Callable[[str], T], urls: Sequence[str], workers: int) -> Iterator[tuple[str, T]]:
    """Each shard and the result of `work` on it, in order of completion; one worker means this process."""
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
