"""The order of the samples, a pure function of (seed, shard stream, epoch): nothing here opens a file.

The global order is the union of L independent shard streams. Stream l fills rows bounds[l]..bounds[l+1] of every global
batch, where bounds[l] = l * B // L, so a global batch holds the same samples for any number of ranks and workers. In
each epoch a stream reads its exact share of all samples, or, where shards are drawn with replacement, one drawn shard.
With weights, each sample of a stream comes from one of several sources, which draw their shards independently.

B: global batch, L: shard streams, P: ranks, S: samples in an epoch.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np

from clipscale.data.hashing import digest

N = TypeVar("N", int, np.ndarray)
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

# The uses of random numbers. The use is part of every key, so that no two uses share a sequence.
SHARD_ORDER = 1
WINDOW = 2
DRAW = 3
AUGMENT = 4
CAPTION = 5
SOURCE_KEY = 6
# 7 is retired: an earlier version used it. The next free number is 10.
WEIGHT = 8
NEGATIVE = 9

# Sources get their exact shares in every block of this many samples of a stream. It is small, so every batch is mixed.
SOURCE_BLOCK = 64


def _splitmix(z: N) -> N:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014) of a number below 2**64, or of an array (uint64)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def rng_key(*numbers: int) -> int:
    """The 64-bit key of a random sequence. The arithmetic is our own, so no library's new version changes the order."""
    state = len(numbers)
    for number in numbers:
        state = _splitmix((state + _GOLDEN + (number & _MASK) * 0xD1342543DE82EF95) & _MASK)
    return state


def permutation(n: int, *numbers: int) -> np.ndarray:
    """A random order of 0..n-1 (int64), a pure function of the key `numbers`."""
    states = np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN + rng_key(*numbers)
    return np.argsort(_splitmix(states), kind="stable")


class CounterRNG:
    """A counter-based generator of uniform random numbers (SplitMix64). `numbers`: the key of its sequence."""

    def __init__(self, *numbers: int) -> None:
        self._state = rng_key(*numbers)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """One number in [low, high)."""
        self._state = (self._state + _GOLDEN) & _MASK
        return low + (high - low) * ((_splitmix(self._state) >> 11) * 2.0**-53)

    def integer(self, n: int) -> int:
        """One integer in 0..n-1."""
        return min(int(self.uniform() * n), n - 1)


def stream_bounds(global_batch: int, num_streams: int) -> np.ndarray:
    """(L+1,): stream l fills rows bounds[l]..bounds[l+1] of the global batch.

    If P divides L, every L/P-th bound is a multiple of B/P, so each stream lies within one rank.
    """
    return np.arange(num_streams + 1, dtype=np.int64) * global_batch // num_streams


@dataclass(frozen=True)
class BatchShare:
    """The global batch, and a rank's share of it."""

    global_batch: int  # a multiple of `world_size`
    rank: int
    world_size: int

    @property
    def local_batch(self) -> int:
        """This rank's samples of a batch."""
        return self.global_batch // self.world_size

    def stream_ids(self, count: int) -> range:
        """The rank's shard streams, out of `count`. One that fills rows of several ranks belongs to each of them."""
        bounds = stream_bounds(self.global_batch, count)
        first = int(np.searchsorted(bounds, self.rank * self.local_batch, side="right")) - 1
        return range(first, int(np.searchsorted(bounds, (self.rank + 1) * self.local_batch, side="left")))

    def rows(self, stream_id: int, count: int) -> range:
        """The rows of the batch that a stream fills, counted from the rank's first row.

        Rows below 0 or from `local_batch` on are another rank's.
        """
        bounds = stream_bounds(self.global_batch, count) - self.rank * self.local_batch
        return range(int(bounds[stream_id]), int(bounds[stream_id + 1]))


def default_streams(global_batch: int, world_size: int, samples: int | None) -> int:
    """The default number of shard streams, lcm(64, 8 * world_size): 64 for 8 ranks, 128 for 16, 192 for 3. It is halved
    for a small batch or data set.

    1, 2, 4 and 8 ranks have the same number, so that their runs see the same batches. It is always a multiple of
    `world_size`, so that no stream is read twice.
    """
    num_streams = math.lcm(64, 8 * world_size)
    while num_streams % (2 * world_size) == 0 and not streams_fit(num_streams, global_batch, samples):
        num_streams //= 2
    return num_streams if streams_fit(num_streams, global_batch, samples) else world_size


def streams_fit(num_streams: int, global_batch: int, samples: int | None) -> bool:
    """Whether every stream fills a row of the batch and has, in an epoch, at least one sample."""
    return num_streams <= global_batch and (samples is None or (global_batch // num_streams) * samples >= global_batch)


@dataclass(frozen=True)
class Segment:
    """Consecutive samples of one shard's shuffled order, which a stream reads."""

    shard: int
    # Part of the shuffle's key, so that a shard has another order each time. It is the epoch, or in `Resampled` a hash.
    shuffle_key: int
    # The first sample, counted in the shuffled order.
    start: int
    # One past the last sample; None if the segment ends with the shard.
    stop: int | None
    # Samples in the shard; None if unknown.
    count: int | None


@dataclass(frozen=True)
class Epochs:
    """Each sample exactly once an epoch.

    Every epoch puts the shards in a random order. Stream l reads samples [bounds[l] S / B, bounds[l+1] S / B) of their
    concatenation. In the first epoch all streams end within one sample of each other, even if L does not divide B.
    Later they may drift apart.

    A share that is not a whole number is rounded the same way in every epoch. A stream with a share of 10.5 samples may
    read 10 of them in each epoch. Then it ends its epochs 5 % sooner than the average stream, and its samples come 5 %
    more often. This bias stays, because another rounding would change the order of existing runs.
    """

    counts: tuple[int, ...]
    global_batch: int
    num_streams: int
    seed: int
    # Samples of an average epoch, where sample weights skip some of `counts` in some epochs.
    expected_samples: float | None = None

    @property
    def epoch_samples(self) -> int:
        """Samples of an average epoch, of all streams."""
        return sum(self.counts) if self.expected_samples is None else round(self.expected_samples)

    def segments(self, stream_id: int, epoch: int, skip: int = 0) -> Iterator[Segment]:
        """The segments that a stream reads in an epoch, after its first `skip` samples."""
        shards, ends = _shard_order(self.counts, self.seed, epoch)
        first = self._sample_bounds[stream_id] + skip
        stop_sample = self._sample_bounds[stream_id + 1]
        shard_index = int(np.searchsorted(ends, first, side="right"))
        while first < stop_sample:
            shard = int(shards[shard_index])
            shard_start = int(ends[shard_index]) - self.counts[shard]
            stop = min(stop_sample, int(ends[shard_index]))
            if stop > first:
                yield Segment(
                    shard=shard,
                    shuffle_key=epoch,
                    start=first - shard_start,
                    stop=stop - shard_start,
                    count=self.counts[shard],
                )
            first = stop
            shard_index += 1

    @cached_property
    def _sample_bounds(self) -> list[int]:
        """(L+1,): the first sample of each stream, then S. Stream l reads samples bounds[l] to bounds[l + 1] - 1."""
        total = sum(self.counts)
        bounds = stream_bounds(self.global_batch, self.num_streams).tolist()
        return [bound * total // self.global_batch for bound in bounds]

    def description(self) -> list[object]:
        """Everything that the order depends on, apart from the shards."""
        return ["epochs", self.seed, self._sample_bounds[:-1]]


# Two entries: streams that have drifted only a little are in at most two epochs at a time.
@lru_cache(maxsize=2)
def _shard_order(counts: tuple[int, ...], seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    shards = permutation(len(counts), seed, SHARD_ORDER, epoch)
    return shards, np.cumsum(np.asarray(counts, dtype=np.int64)[shards])


@dataclass(frozen=True)
class Resampled:
    """Shards drawn with replacement. "Epoch" k of a stream is its k-th draw, which is one shard."""

    # The shards to draw from, all equally likely. Each is read to its end, so every sample is equally likely.
    shards: tuple[int, ...]
    counts: tuple[int | None, ...]
    num_streams: int
    seed: int

    def segments(self, stream_id: int, epoch: int, skip: int = 0) -> Iterator[Segment]:
        """The one shard of draw `epoch`, after its first `skip` samples."""
        shard = self.shards[CounterRNG(self.seed, DRAW, stream_id, epoch).integer(len(self.shards))]
        count = self.counts[shard]
        yield Segment(shard=shard, shuffle_key=rng_key(stream_id, epoch), start=skip, stop=count, count=count)

    def description(self) -> list[object]:
        """See `Epochs.description`."""
        return ["resampled", self.seed, self.shards]


@dataclass(frozen=True)
class WeightedSources:
    """Several sources. Each contributes its share of the samples and draws its own shards with replacement."""

    # Each source's weight. At least one is positive.
    weights: tuple[float, ...]
    # Each shard's source.
    source_of: tuple[int, ...]
    counts: tuple[int | None, ...]
    num_streams: int
    seed: int

    def source(self, stream_id: int, sample_index: int) -> int:
        """The source of a stream's usable sample `sample_index`.

        A source gets its share, rounded down or up, of every block of SOURCE_BLOCK samples, in a random order. Each
        source has an interval of [0, 1) as long as its share. A block has SOURCE_BLOCK equally spaced points, and each
        point picks the source whose interval it lies in. From block to block the points shift by the golden ratio, so
        the shares are exact in the long run.
        """
        block, offset = divmod(sample_index, SOURCE_BLOCK)
        return int(_block_sources(self.weights, self.seed, stream_id, block)[offset])

    def within(self, source: int) -> Resampled:
        """The order of one source's shards."""
        shards_of_source = [shard for shard, number in enumerate(self.source_of) if number == source]
        filled = tuple(shard for shard in shards_of_source if self.counts[shard] != 0)
        return Resampled(filled, self.counts, self.num_streams, rng_key(self.seed, source))

    def description(self) -> list[object]:
        """See `Epochs.description`."""
        return ["weighted", self.seed, [weight / sum(self.weights) for weight in self.weights], list(self.source_of)]


@lru_cache(maxsize=1024)
def _block_sources(weights: tuple[float, ...], seed: int, stream_id: int, block: int) -> np.ndarray:
    start = (CounterRNG(seed, SOURCE_KEY, stream_id).uniform() + block * (_GOLDEN / 2**64)) % 1.0
    ends = np.cumsum(weights)
    points = (np.arange(SOURCE_BLOCK) + start) * (ends[-1] / SOURCE_BLOCK)
    return np.searchsorted(ends, points, side="right")[permutation(SOURCE_BLOCK, seed, SOURCE_KEY, stream_id, block)]


Order = Epochs | Resampled | WeightedSources


def fingerprint(order: Order, names: Sequence[str], window: int) -> str:
    """A digest of what a position refers to: the shards' names and counts, the seed, the streams, the window."""
    return digest(json.dumps([order.description(), list(names), list(order.counts), window]))
