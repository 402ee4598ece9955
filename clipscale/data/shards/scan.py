"""Scans the headers of shards, in several processes, and brings the indexes of their folders up to date."""

import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

import numpy as np

from clipscale.data.sample import key_and_extension
from clipscale.data.shards import index
from clipscale.data.shards.access import SourceError, leaf_of
from clipscale.data.shards.reader import ERRORS
from clipscale.data.shards.store import Store
from clipscale.data.shards.tar import next_member, padded, skip, unpacked

T = TypeVar("T")

SERIAL_BYTES = 256 << 20
"""Shards with fewer bytes together are scanned by one process; starting others would take longer."""


def scan_shard(url: str) -> index.Entry:
    """The index entry of a shard, from its headers, grouped into samples as `read_shard` does. The entry notes damage.

    Raises OSError or SourceError if the shard cannot be opened.
    """
    size, version = Store().state(url)
    offsets, members, sizes = list[int](), Counter[str](), Counter[str]()
    reason, detail, can_seek = None, "", False
    with closing(Store().open(url).stream) as source:
        try:
            archive, can_seek = unpacked(source)
            start, key = 0, None
            while (header := next_member(archive)) is not None:
                name, length, taken = header
                if named := key_and_extension(name):
                    if named[0] != key:
                        key = named[0]
                        offsets.append(start)
                    members[named[1]] += 1
                    sizes[named[1]] += length
                skip(archive, padded(length), can_seek)
                start += taken + padded(length)
            offsets.append(start)
            if archive.tell() <= start:  # no block of zeros: where contents are skipped, the only sign of a cut
                raise tarfile.ReadError("ends without the zeros that end an archive: it may have been cut off")
        except (*ERRORS, SourceError) as error:
            reason = getattr(error, "reason", "truncated_shard" if offsets else "unreadable_shard")
            detail = f"{url}: {error}"
    samples = max(0, len(offsets) - 1)
    totals = {extension: (count, sizes[extension]) for extension, count in sorted(members.items())}
    known = np.array(offsets, dtype=np.int64) if samples and can_seek else None
    return index.Entry(leaf_of(url), size, version, samples, totals, reason, detail, known)


@dataclass
class Update:
    """The result of `update_indexes`."""

    read: int = 0
    unchanged: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Shards that could not be opened, and why."""


def update_indexes(
    urls: Sequence[str],
    *,
    cache: str | None = None,
    workers: int = 1,
    force: bool = False,
    done: Callable[[str, int, index.Entry | None], None] = lambda url, size, entry: None,
) -> Update:
    """Bring the indexes of these shards' folders up to date, at `index.writable_path`. Raises UserError.

    Skips shards whose entry still holds, unless `force`. Entries are written one by one, so a killed run's work is kept.
    `done` is called after every shard with its size, and its entry unless it was skipped or failed.
    """
    result = Update()
    folders: dict[str, list[str]] = defaultdict(list)
    for url in urls:
        folders[index.folder_of(url)].append(url)
    for folder, shards in folders.items():
        path, work = index.writable_path(folder, cache), dict[str, int]()
        indexed = {name: state for name, *state in index.query(path, "SELECT name, size, version FROM shards")}
        with ThreadPoolExecutor(16) as pool:
            states = list(pool.map(partial(_or_error, Store().state), shards))
        for url, state in zip(shards, states):
            if isinstance(state, str):
                result.failed[url] = state
                done(url, 0, None)
            elif not force and indexed.get(leaf_of(url)) == list(state):
                result.unchanged += 1
                done(url, state[0], None)
            else:
                work[url] = state[0]
        if not work:
            continue
        processes = 1 if sum(work.values()) < SERIAL_BYTES else workers
        with index.writing(path) as base:
            for url, entry in map_shards(partial(_or_error, scan_shard), list(work), processes):
                if isinstance(entry, str):
                    result.failed[url] = entry
                else:
                    index.write(base, entry)
                    result.read += 1
                done(url, work[url], None if isinstance(entry, str) else entry)
    return result


def _or_error(work: Callable[[str], Any], url: str) -> Any:
    """What `work` returns for a shard, or the message of its error."""
    try:
        return work(url)
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
