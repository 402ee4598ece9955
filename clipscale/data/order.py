"""Which sample comes when, as a pure function of (seed, lane, turn): nothing here opens a file.

The global order is the union of L independent lanes. Lane l gives bounds[l+1] - bounds[l] samples to every global batch, where
bounds[l] = l * B // L, so a global batch is the same set of samples for any number of ranks and workers. A lane's turns are the epochs
(its share of each, exact) or its draws of shards with replacement (resampled).

B: global batch, L: lanes, P: ranks, S: samples in an epoch.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

# What a random number is for; part of every key, so that no two uses share a sequence.
SHARDS, WINDOW, DRAW, AUGMENT, CAPTION = 1, 2, 3, 4, 5


def _finish(z: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014), elementwise on uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def key(*parts: int) -> int:
    """A 64-bit key from integers; own arithmetic, so that an order outlives changes in library generators."""
    state = len(parts)
    for part in parts:
        z = (state + _GOLDEN + (part & _MASK) * 0xD1342543DE82EF95) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        state = z ^ (z >> 31)
    return state


def permutation(n: int, *parts: int) -> np.ndarray:
    """A random order of 0..n-1 (int64), a pure function of the key `parts`."""
    steps = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key(*parts))
    return np.argsort(_finish(steps), kind="stable")


class Draws:
    """Uniform random numbers from a key: SplitMix64, cheap to make for every sample."""

    def __init__(self, *parts: int) -> None:
        self._state = key(*parts)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """One number in [low, high)."""
        self._state = (self._state + _GOLDEN) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return low + (high - low) * (((z ^ (z >> 31)) >> 11) * 2.0**-53)

    def integer(self, n: int) -> int:
        """One integer in 0..n-1."""
        return min(int(self.uniform() * n), n - 1)


def lane_bounds(batch: int, lanes: int) -> np.ndarray:
    """(L+1,): lane l fills places bounds[l]..bounds[l+1] of the global batch; exact multiples of B/P at every L/P lanes."""
    return np.arange(lanes + 1, dtype=np.int64) * batch // lanes


def local_places(lane: int, lanes: int, batch: int, rank: int, world: int) -> range:
    """The places of rank's part of the global batch that a lane fills."""
    bounds, origin = lane_bounds(batch, lanes), rank * (batch // world)
    return range(int(bounds[lane]) - origin, int(bounds[lane + 1]) - origin)


def default_lanes(batch: int, world: int, samples: int | None) -> int:
    """How many lanes when nobody says: 64, and 8 a rank beyond 8 ranks; halved while the batch or the data set is too small for them.

    The same for 1, 2, 4 and 8 ranks, so that their runs see the same batches. Always a multiple of `world`.
    """
    lanes = math.lcm(64, 8 * world)
    while lanes % (2 * world) == 0 and not lanes_fit(lanes, batch, samples):
        lanes //= 2
    return lanes if lanes_fit(lanes, batch, samples) else world


def lanes_fit(lanes: int, batch: int, samples: int | None) -> bool:
    """Whether every lane has a place in the batch and, in an epoch, at least one sample."""
    return lanes <= batch and (samples is None or (batch // lanes) * samples >= batch)


@dataclass(frozen=True)
class Segment:
    """A stretch of one shard's shuffled order that a lane reads without a break.

    Places start..stop of the shard's emission order (stop None: to the end, wherever that is); `count` samples in the shard where known;
    `turn` distinguishes the shuffles of different visits.
    """

    shard: int
    turn: int
    start: int
    stop: int | None
    count: int | None


@dataclass(frozen=True)
class Epochs:
    """Each sample exactly once an epoch.

    Epoch e puts the shards in a random order; lane l takes the stretch [bounds[l] S / B, bounds[l+1] S / B) of their concatenation,
    so that all lanes come to the end of an epoch together whatever B mod L is.
    """

    counts: tuple[int, ...]
    batch: int
    lanes: int
    seed: int

    def segments(self, lane: int, turn: int, skip: int = 0) -> Iterator[Segment]:
        """What `lane` reads in epoch `turn` after its first `skip` samples."""
        shards, ends = _epoch(self.counts, self.seed, turn)
        first, last = self.reach(lane)
        first += skip
        at = int(np.searchsorted(ends, first, side="right"))
        while first < last:
            shard = int(shards[at])
            begin = int(ends[at]) - self.counts[shard]
            stop = min(last, int(ends[at]))
            if stop > first:
                yield Segment(shard, turn, first - begin, stop - begin, self.counts[shard])
            first, at = stop, at + 1

    def reach(self, lane: int) -> tuple[int, int]:
        """The lane's stretch of the epoch's concatenated shards."""
        total, bounds = sum(self.counts), lane_bounds(self.batch, self.lanes)
        return int(bounds[lane]) * total // self.batch, int(bounds[lane + 1]) * total // self.batch

    def description(self) -> list[object]:
        """What, besides the shards, the order depends on."""
        return ["epochs", self.seed, [self.reach(lane)[0] for lane in range(self.lanes)]]


@lru_cache(maxsize=4)
def _epoch(counts: tuple[int, ...], seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The epoch's order of shards and the end of each in their concatenation."""
    shards = permutation(len(counts), seed, SHARDS, epoch)
    return shards, np.cumsum(np.asarray(counts, dtype=np.int64)[shards])


@dataclass(frozen=True)
class Resampled:
    """Shards drawn with replacement: turn k of a lane is its k-th draw. `cumulative` is the running sum of the shards' weights."""

    cumulative: tuple[float, ...]
    counts: tuple[int | None, ...]
    lanes: int
    seed: int

    def segments(self, lane: int, turn: int, skip: int = 0) -> Iterator[Segment]:
        """The one shard of draw `turn`, after its first `skip` samples."""
        where = Draws(self.seed, DRAW, lane, turn).uniform() * self.cumulative[-1]
        shard = min(int(np.searchsorted(self.cumulative, where, side="right")), len(self.cumulative) - 1)
        yield Segment(shard, key(lane, turn), skip, self.counts[shard], self.counts[shard])

    def description(self) -> list[object]:
        """What, besides the shards, the order depends on."""
        return ["resampled", self.seed, [w / self.cumulative[-1] for w in self.cumulative]]


Order = Epochs | Resampled


def fingerprint(order: Order, names: Sequence[str], window: int) -> str:
    """A short digest of everything a position refers to: the shards' names and counts, the seed, the lanes, the shuffle window."""
    text = json.dumps([order.description(), list(names), list(order.counts), window])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
