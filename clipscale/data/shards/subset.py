"""`data.only_keys`: reads the samples of a subset as if the shards held no others.

A subset is a list of uids in DataComp's format (https://github.com/mlfoundations/datacomp), or of keys. A shard is
scanned for its samples; an index of the subset, beside that of the shards' folder, remembers their numbers.
"""

from bisect import bisect_left
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from clipscale.common.errors import UserError
from clipscale.data.decode import json_fields
from clipscale.data.sample import BrokenSampleError, RawSample, limits
from clipscale.data.shards import index
from clipscale.data.shards.addresses import SourceError, digest
from clipscale.data.shards.samples import ReadProblem, read_samples
from clipscale.data.shards.store import Store
from clipscale.data.shards.tar import BLOCK

PAIR = np.dtype("u8,u8")
"""The halves of a uid of 32 hexadecimal digits, or of a key's hash."""


class Subset(NamedTuple):
    """The subset that a file lists. Sent to processes by pickle, which read the file themselves."""

    path: str
    name: str
    """A digest of the file's path, size and time of change."""

    @property
    def by_uid(self) -> bool:
        """Whether samples are found by the `uid` of their json, and not by their key."""
        return self.path.endswith(".npy")

    def has(self, raw: RawSample) -> bool:
        """Whether the subset has this sample."""
        pairs = _pairs(self)
        try:
            pair = _halves(json_fields(raw.members["json"])["uid"] if self.by_uid else _hash(raw.key))
        except (KeyError, TypeError, ValueError, BrokenSampleError):
            return False
        at = bisect_left(pairs, pair, key=lambda row: tuple(row.item()))
        return at < len(pairs) and pairs[at].item() == pair

    def scan(self, url: str) -> index.Entry:
        """The entry of a shard in the subset's index: its samples, and their numbers, in the place of offsets.

        Raises OSError or SourceError if the shard cannot be read.
        """
        problem = ReadProblem()
        store = Store()
        state = store.state(url)
        kinds = limits((), ["json"] if self.by_uid else [])
        raws = read_samples(url, problem, lambda _: True, kinds, store)
        numbers = np.array([raw.index for raw in raws if self.has(raw)], np.int64)
        if problem.reason not in (None, "truncated_shard", "unreadable_shard"):
            raise SourceError(problem.reason, problem.detail)
        return index.Entry(
            index.name_in_index(url), *state, len(numbers), problem.reason, problem.detail, numbers * BLOCK
        )

    def numbers(self, url: str, store: Store) -> dict[int, int]:
        """A sample's number in the shard -> its number among those of the subset. Raises OSError or SourceError."""
        offsets = index.sample_offsets(url, store.state(url), self)
        if offsets is None:  # not remembered: another start would find counts, and take another order
            offsets = self.scan(url).offsets
            assert offsets is not None
        return {number: place for place, number in enumerate((offsets // BLOCK).tolist())}


def subset_of(path: str | None) -> Subset | None:
    """The subset in a file. Raises UserError if there is no such file."""
    if path is None:
        return None
    file = Path(path).expanduser().absolute()
    try:
        state = file.stat()
    except OSError as error:
        raise UserError(f"data.only_keys={path}: cannot be read ({error.strerror})") from error
    return Subset(str(file), digest(f"{file} {state.st_size} {state.st_mtime_ns}"))


@lru_cache(maxsize=1)
def _pairs(subset: Subset) -> np.ndarray:
    """The file's pairs, sorted; those of uids stay on disk. Raises UserError."""
    what = f"data.only_keys={subset.path}"
    try:
        if not subset.by_uid:
            text = Path(subset.path).read_text(encoding="utf-8", errors="surrogateescape")  # as members' names are
            keys = map(str.strip, text.split("\n"))
            return np.sort(np.array([_halves(_hash(key)) for key in keys if key], PAIR))
        pairs = np.asarray(np.load(subset.path, mmap_mode="r"))
    except (OSError, ValueError) as error:
        raise UserError(f"{what}: cannot be read ({error})") from error
    if pairs.dtype != PAIR or pairs.ndim != 1:
        raise UserError(f"{what}: {pairs.dtype} {pairs.shape}, not rows of numpy's dtype('u8,u8')")
    for start in range(0, len(pairs), 1 << 20):  # the whole file may not fit into memory
        high = pairs["f0"][start : start + (1 << 20) + 1]
        if (high[:-1] > high[1:]).any():
            raise UserError(f"{what}: its rows are not in order; sort and save them again with numpy")
    return pairs


def _hash(key: str) -> str:
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _halves(uid: str) -> tuple[int, int]:
    return int(uid[:16], 16), int(uid[16:], 16)
