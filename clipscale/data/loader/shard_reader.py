"""Reads the samples of one shard stream in order: window after window, each shuffled."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property, partial
from itertools import count, islice

from clipscale.data.addresses import basename
from clipscale.data.order import WINDOW, Epochs, Order, Segment, WeightedSources, fingerprint, permutation
from clipscale.data.sample import RawSample
from clipscale.data.shards import index
from clipscale.data.shards.features import TeacherFeatures
from clipscale.data.shards.reader import ReadFailure, read_shard
from clipscale.data.shards.store import Store
from clipscale.data.shards.subset import Subset

# A shuffle window ends early at this many bytes. Ordinary data stays below: 256 samples would need half a megabyte
# each. A stream holds two windows: it gives one out while it reads the next. `_drain_early` gives samples out early, so
# that both together stay near this limit.
WINDOW_BYTES = 128 << 20


@dataclass(frozen=True)
class OrderedShards:
    """The shards of a run and the order of their samples."""

    urls: tuple[str, ...]
    order: Order
    window: int  # samples in a shuffle window
    # A digest of the samples and weights that a file lists; empty without such a file.
    subset_digests: Sequence[str] = ()
    # The teachers whose features lie beside the samples.
    teachers: tuple[TeacherFeatures, ...] = ()

    @property
    def epoch_samples(self) -> int | None:
        """Samples of an average epoch of all streams; None if shards are drawn with replacement."""
        return self.order.epoch_samples if isinstance(self.order, Epochs) else None

    @cached_property
    def order_fingerprint(self) -> str:
        """A digest of what a position refers to. It leaves out the shards' folder, so that shards may move."""
        return fingerprint(self.order, [*map(basename, self.urls), *self.subset_digests], self.window)

    @cached_property
    def sources(self) -> list["OrderedShards"]:
        """The weighted sources, each with its share of the window; without weights, all shards are one source."""
        if not isinstance(self.order, WeightedSources):
            return [self]
        order = self.order
        total = sum(order.weights)
        windows = [max(1, round(self.window * (weight / total))) for weight in order.weights]
        return [replace(self, order=order.within(source), window=window) for source, window in enumerate(windows)]


class WindowCursor:
    """The shuffle windows of a segment, one at a time: the current one's samples in their order.

    Windows count all samples of the shard, whether they are read or not. So they do not depend on where reading starts,
    or on whether there is an index.
    """

    def __init__(self, segment: Segment, window: int, seed: int) -> None:
        self.segment = segment
        self._window = window
        self._seed = seed
        # The current window's first sample in the shard, and the window's number.
        self.start = 0
        self.number = 0
        self.resize(self._usual_size())

    def _usual_size(self) -> int:
        count = self.segment.count
        return self._window if count is None else min(self._window, count - self.start)

    def resize(self, size: int) -> None:
        """Set the number of samples of the current window, which determines its order."""
        segment = self.segment
        order = permutation(size, self._seed, WINDOW, segment.shuffle_key, segment.shard, self.number)
        stop = size if segment.stop is None else min(segment.stop - self.start, size)
        self.size = size
        # The window's samples that belong to the segment, in shuffled order, as offsets from the window's first sample.
        self.sample_order = order[max(segment.start - self.start, 0) : stop].tolist()
        self._needed = set(self.sample_order)

    def needs(self, sample: int) -> bool:
        """Whether a sample must be read.

        If the shard's count is unknown, the window's order is known only at the window's end. All its samples are then
        read, unless the whole window lies before the segment.
        """
        if self.segment.count is None:
            return self.start + self._window > self.segment.start
        return sample - self.start in self._needed

    @property
    def is_partly_in_segment(self) -> bool:
        """Whether only a part of the window's samples belongs to the segment. False for a shard of unknown count."""
        return self.segment.count is not None and 0 < len(self.sample_order) < self.size

    def advance(self) -> bool:
        """Move to the next window; False after the segment's last."""
        self.start += self.size
        self.number += 1
        if self.segment.stop is not None and self.start >= self.segment.stop:
            return False
        self.resize(self._usual_size())
        return True


# An epoch, a segment in it, and a sample of the segment, which may be missing.
SegmentSample = tuple[int, Segment, RawSample]
# A sample that a reader gives out, with its segment.
OutgoingSample = tuple[Segment, RawSample]


@dataclass
class Window:
    """The samples of a shuffle window that are still to be given out, in reverse order: the next one is last."""

    items: list[SegmentSample] = field(default_factory=list)
    num_bytes: int = 0

    @classmethod
    def holding(cls, epoch: int, segment: Segment, samples: Sequence[RawSample]) -> "Window":
        """`samples`: in the order in which they are given out."""
        return cls([(epoch, segment, sample) for sample in reversed(samples)], _num_bytes(samples))

    def pop(self) -> SegmentSample:
        """Remove the next one."""
        item = self.items.pop()
        self.num_bytes -= item[2].num_bytes
        return item


class WindowEnd(Enum):
    """Where the reading of a window ended."""

    # All samples of the window were read, or the shard has ended before its known count. In the second case the unread
    # samples are given out as missing.
    FULL = auto()
    # The window has reached WINDOW_BYTES, and becomes smaller.
    CUT = auto()
    # A shard of unknown count has ended. The window becomes smaller, and no other follows.
    SHARD_END = auto()

    @classmethod
    def after(cls, cursor: WindowCursor, samples_read: Sequence[RawSample]) -> "WindowEnd":
        """`samples_read`: the samples of the cursor's window that were read."""
        if len(samples_read) == cursor.size:
            return cls.FULL
        if _num_bytes(samples_read) > WINDOW_BYTES:
            return cls.CUT
        return cls.SHARD_END if cursor.segment.count is None else cls.FULL


class ShardReader:
    """Reads a shard stream, or one source of it.

    Its position is `epoch` and `num_given_out`, the number of items given out in that epoch. Two windows are held:

        reading   window 0 | window 1 | window 2 | ...
        given out          | window 0 | window 1 | ...
    """

    def __init__(
        self,
        shards: OrderedShards,
        stream_id: int,
        start: tuple[int, int],
        size_limits: Mapping[str, int],
        store: Store,
        subset: Subset | None = None,
        on_open: Callable[[str], None] = lambda url: None,
    ) -> None:
        """`start`: the epoch, and the samples read in it. `on_open` is called with each shard before it is opened."""
        self._shards = shards
        self._stream_id = stream_id
        self._size_limits = size_limits
        self._store = store
        self._subset = subset
        self._on_open = on_open
        # The shard that is read now, and the samples of it that have not been read.
        self.url = ""
        self._raw_samples: Generator[RawSample, None, None] = _no_samples()
        self.epoch, self.num_given_out = start
        # The window that is given out while the next one is read.
        self._outgoing = Window()
        # The segment that the caller has given up. Its remaining samples are given out as `fruitless_shard`.
        self.abandoned: Segment | None = None
        # All samples from the position on, with their segments.
        self.items = self._items()

    def _items(self) -> Generator[OutgoingSample, None, None]:
        """Give out each window while the next one is read."""
        try:
            for epoch, segment in self._segments():
                yield from self._read_segment(epoch, segment)
        finally:
            self._raw_samples.close()

    def _segments(self) -> Iterator[tuple[int, Segment]]:
        """All segments from the position on, with their epochs."""
        skip = self.num_given_out
        order = self._shards.order
        assert not isinstance(order, WeightedSources), "each source has a reader of its own"
        for epoch in count(self.epoch):
            for segment in order.segments(self._stream_id, epoch, skip):
                yield epoch, segment
            skip = 0

    def _read_segment(self, epoch: int, segment: Segment) -> Iterator[OutgoingSample]:
        """Read the windows of one segment. Gives out the window before each."""
        url = self._shards.urls[segment.shard]
        cursor = WindowCursor(segment, self._shards.window, self._shards.order.seed)
        failure = ReadFailure()
        self._open(url, failure, cursor)
        is_last = False
        while not is_last:
            samples_read = yield from self._read_window(cursor)
            end = WindowEnd.after(cursor, samples_read)
            needs_others = end is WindowEnd.CUT and cursor.is_partly_in_segment
            if end is not WindowEnd.FULL:
                cursor.resize(len(samples_read))
            if needs_others:
                # The smaller window has another order, so other samples of it belong to the segment. Some of them may
                # have been skipped: read the window again.
                self._open(url, failure, cursor)
                self._skip(cursor.start)
                continue
            missing = RawSample.missing(url, failure.reason or "missing_from_shard", failure.detail or url)
            samples = [samples_read[i] if i < len(samples_read) else missing for i in cursor.sample_order]
            is_last = not cursor.advance()
            if end is WindowEnd.SHARD_END:
                is_last = True
                samples += _placeholder_of_rest(cursor, failure, url)
            while self._outgoing.items:
                yield self._next_outgoing()
            self._outgoing = Window.holding(epoch, segment, samples)
            del samples_read, samples  # a sample's memory is then free once it is given out

    def _read_window(self, cursor: WindowCursor) -> Generator[OutgoingSample, None, list[RawSample]]:
        """Read and return the samples of the current window, up to WINDOW_BYTES. Gives out earlier ones meanwhile."""
        samples_read = []
        num_bytes = 0
        for raw in islice(self._raw_samples, cursor.size):
            self._store.poll()
            samples_read.append(raw)
            num_bytes += raw.num_bytes
            yield from self._drain_early(num_bytes)
            if num_bytes > WINDOW_BYTES or cursor.segment is self.abandoned:
                break
        return samples_read

    def _drain_early(self, bytes_read: int) -> Iterator[OutgoingSample]:
        """Give out a sample, and more while both windows together exceed WINDOW_BYTES.

        `bytes_read`: bytes of the window that is being read. A call after each sample that is read spreads requests
        evenly.
        """
        while self._outgoing.items:
            yield self._next_outgoing()
            if self._outgoing.num_bytes + bytes_read <= WINDOW_BYTES:
                break

    def _next_outgoing(self) -> OutgoingSample:
        """The next sample to give out. Moves the position."""
        epoch, segment, sample = self._outgoing.pop()
        if epoch != self.epoch:
            self.epoch = epoch
            self.num_given_out = 0
        self.num_given_out += 1
        if segment is self.abandoned:
            sample = RawSample.missing(sample.url, "fruitless_shard", sample.url)
        return segment, sample

    def _skip(self, samples: int) -> None:
        for _ in islice(self._raw_samples, samples):
            self._store.poll()

    def _open(self, url: str, failure: ReadFailure, cursor: WindowCursor) -> None:
        """Begin at a shard's first sample. `failure` receives why reading ends early."""
        self._raw_samples.close()
        self.url = url
        self._on_open(url)
        offsets = partial(index.sample_offsets, count_fault=self._store.count_fault)
        self._raw_samples = read_shard(
            url, failure, cursor.needs, self._size_limits, store=self._store, subset=self._subset, offsets=offsets
        )


def _no_samples() -> Generator[RawSample, None, None]:
    yield from ()


def _num_bytes(samples: Sequence[RawSample]) -> int:
    return sum(sample.num_bytes for sample in samples)


def _placeholder_of_rest(cursor: WindowCursor, failure: ReadFailure, url: str) -> list[RawSample]:
    """A placeholder for all samples that cannot be read, if a shard of unknown count ends early; otherwise nothing."""
    is_empty = cursor.start == 0
    reason = failure.reason or ("empty_shard" if is_empty else "")
    if not reason or cursor.start < cursor.segment.start:
        return []
    return [RawSample.missing(url, reason, failure.detail or url)]
