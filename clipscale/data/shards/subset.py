"""`data.only_keys`: reads the samples of a subset as if the shards held no others.

A subset is a list of uids in DataComp's format, or of keys. A shard is scanned for its samples; an index of the subset,
beside that of the shards' folder, remembers their numbers.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np

from clipscale.common.errors import UserError
from clipscale.data.decode import json_fields
from clipscale.data.sample import BrokenSampleError, RawSample, limits
from clipscale.data.shards import index
from clipscale.data.shards.addresses import SourceError, digest, leaf_of
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Opened, Store
from clipscale.data.shards.tar import BLOCK

PAIR = np.dtype("u8,u8")
"""The halves of a uid of 32 hexadecimal digits (https://github.com/mlfoundations/datacomp), or of a key's hash."""
ROWS = 1 << 20
"""Rows of the file that are compared at once."""


@dataclass(frozen=True)
class Subset:
    """The subset that a file lists. Sent to processes by pickle, which read the file themselves."""

    path: str
    name: str
    """A digest of the file's path, size and time of change."""

    def has(self, raw: RawSample) -> bool:
        """Whether the subset has this sample, by the `uid` of its json or by its key."""
        pairs = _pairs(self.path, self.name)
        pair = _hashed(raw.key)
        if _has_uids(self.path):
            try:
                uid = json_fields(raw.members["json"])["uid"]
                pair = int(uid[:16], 16), int(uid[16:], 16)
            except (KeyError, TypeError, ValueError, BrokenSampleError):
                return False
        at = bisect_left(pairs, pair, key=np.void.item)
        return at < len(pairs) and pairs[at].item() == pair

    def scan(self, url: str) -> index.Entry:
        """The entry of a shard in the subset's index: its samples, and their numbers, in the place of offsets.

        Raises OSError or SourceError if the shard cannot be read.
        """
        problem, store = ReadProblem(), Store()
        size, version = store.state(url)
        raws = read_shard(url, problem, kinds=limits((), ("json",)) if _has_uids(self.path) else {}, store=store)
        numbers = np.array([raw.index for raw in raws if self.has(raw)], np.int64)
        if problem.reason not in (None, "truncated_shard", "unreadable_shard"):
            raise SourceError(problem.reason, problem.detail)
        return index.Entry(
            leaf_of(url), size or 0, version, len(numbers), problem.reason, problem.detail, numbers * BLOCK
        )

    def numbers(self, url: str, store: Store) -> dict[int, int]:
        """A sample's number in the shard -> its number among those of the subset. Raises OSError or SourceError."""
        offsets = index.sample_offsets(url, Opened(None, *store.state(url)), self)
        if offsets is None:  # not remembered: another start would find counts, and take another order
            offsets = self.scan(url).offsets
        return {number: place for place, number in enumerate((offsets // BLOCK).tolist())}


def subset_of(path: str) -> Subset:
    """The subset in a file. Raises UserError if there is no such file."""
    file = Path(path).expanduser().absolute()
    try:
        about = file.stat()
    except OSError as error:
        raise UserError(f"data.only_keys={path}: cannot be read ({error.strerror})") from error
    return Subset(str(file), digest(f"{file} {about.st_size} {about.st_mtime_ns}"))


def read_subset(
    url: str,
    problem: ReadProblem,
    want: Callable[[int], bool],
    kinds: Mapping[str, int] | None,
    *,
    lazy: bool,
    store: Store,
    indexed: bool,
) -> Iterator[RawSample]:
    """What `read_shard` would give for a shard that holds only the samples of `data.only_keys`."""
    whole, path = copy(store), store.config.only_keys
    whole.config = replace(store.config, only_keys=None)
    assert path is not None
    numbers = subset_of(path).numbers(url, whole)
    wanted = lambda number: number in numbers and want(numbers[number])  # noqa: E731
    for raw in read_shard(url, problem, wanted, kinds, lazy=lazy, store=whole, indexed=indexed):
        if raw.index in numbers:
            yield replace(raw, index=numbers[raw.index])


def _has_uids(path: str) -> bool:
    return path.endswith(".npy")


@lru_cache(maxsize=1)
def _pairs(path: str, name: str) -> np.ndarray:
    """The file's pairs, sorted; those of uids stay on disk. Raises UserError. `name`: of this state of the file."""
    try:
        if not _has_uids(path):
            lines = Path(path).read_text(encoding="utf-8").split("\n")
            return np.sort(np.array([_hashed(line.strip()) for line in lines if line.strip()], PAIR))
        pairs = np.asarray(np.load(path, mmap_mode="r"))
    except (OSError, ValueError) as error:
        raise UserError(f"data.only_keys={path}: cannot be read ({error})") from error
    if pairs.dtype != PAIR or pairs.ndim != 1:
        raise UserError(f"data.only_keys={path}: {pairs.dtype} {pairs.shape}, not rows of numpy's dtype('u8,u8')")
    for start in range(0, len(pairs), ROWS):
        part = pairs[start : start + ROWS + 1]
        high, low = part["f0"], part["f1"]
        if not ((high[:-1] < high[1:]) | ((high[:-1] == high[1:]) & (low[:-1] <= low[1:]))).all():
            raise UserError(f"data.only_keys={path}: its rows are not in order; sort and save them again with numpy")
    return pairs


def _hashed(key: str) -> tuple[int, int]:
    value = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(value[:8], "big"), int.from_bytes(value[8:], "big")
