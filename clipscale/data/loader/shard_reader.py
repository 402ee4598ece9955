"""Reads the samples of one shard stream in order: window after window, each shuffled."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count, islice

from clipscale.data.addresses import basename
from clipscale.data.order import WINDOW, Epochs, Order, Segment, WeightedSources, fingerprint, permutation
from clipscale.data.sample import RawSample
from clipscale.data.shards import index
from clipscale.data.shards.features import TeacherFeatures
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store
from clipscale.data.shards.subset import Subset

# A shuffle window ends early at this many bytes. Ordinary data stays below: 256 samples would need half a megabyte
# each. A stream's two windows, the one that is given out and the one that is read, together hold about this much at
# most.
WINDOW_BYTES = 128 << 20


@dataclass(frozen=True)
class OrderedShards:
    """The shards of a run and the order of their samples."""

    urls: tuple[str, ...]
    order: Order
    window: int  # samples in a shuffle window
    # A digest of the samples and weights that a file lists, if one does.
    subset_digests: Sequence[str] = ()
    # The teachers whose features lie beside the samples.
    teachers: tuple[TeacherFeatures, ...] = ()

    @property
    def samples(self) -> int | None:
        """Samples of an average epoch, of all streams; None if shards are drawn with replacement."""
        return self.order.samples if isinstance(self.order, Epochs) else None

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what a position refers to. The shards' folder is not part of it, so that they may move."""
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

    Windows count all samples of the shard, read or not. So they are the same from any start, with an index or without.
    """

    def __init__(self, segment: Segment, window: int, seed: int) -> None:
        self.segment = segment
        self._window = window
        self._seed = seed
        self.start = self.number = 0  # the current window's first sample in the shard, and its number
        self.resize(self._usual_size())

    def _usual_size(self) -> int:
        count = self.segment.count
        return self._window if count is None else min(self._window, count - self.start)

    def resize(self, size: int) -> None:
        """Set the number of samples of the current window, which determines its order."""
        segment = self.segment
        order = permutation(size, self._seed, WINDOW, segment.epoch, segment.shard, self.number)
        stop = size if segment.stop is None else min(segment.stop - self.start, size)
        self.size = size
        # The window's samples that belong to the segment, in shuffled order, counted from the window's first.
        self.order = order[max(segment.start - self.start, 0) : stop].tolist()
        self._needed = set(self.order)

    def needs(self, sample: int) -> bool:
        """Whether a sample must be read.

        If the shard's count is unknown, the window's order is known only at the window's end. All its samples are then
        read, unless the whole window lies before the segment.
        """
        if self.segment.count is None:
            return self.start + self._window > self.segment.start
        return sample - self.start in self._needed

    @property
    def is_part(self) -> bool:
        """Whether only a part of the window's samples belongs to the segment, of a shard of known count."""
        return self.segment.count is not None and 0 < len(self.order) < self.size

    def advance(self) -> bool:
        """Move to the next window; False after the segment's last."""
        self.start += self.size
        self.number += 1
        if self.segment.stop is not None and self.start >= self.segment.stop:
            return False
        self.resize(self._usual_size())
        return True


def _damage(windows: WindowCursor, problem: ReadProblem, url: str) -> list[RawSample]:
    """For a shard of unknown count that ends early: one placeholder for all samples that cannot be read."""
    reason = problem.reason or ("" if windows.start else "empty_shard")
    if not reason or windows.start < windows.segment.start:
        return []
    return [RawSample.lost(url, reason, problem.detail or url)]


class ShardReader:
    """Reads a shard stream, or one source of it.

    Its position is `epoch` and `index`, the number of items given out in that epoch.
    """

    def __init__(
        self,
        shards: OrderedShards,
        stream: int,
        start: tuple[int, int],
        size_limits: Mapping[str, int],
        store: Store,
        subset: Subset | None = None,
        on_open: Callable[[str], None] = lambda url: None,
    ) -> None:
        """`start`: the epoch, and the samples read in it. `on_open` is called with each shard before it is opened."""
        self._shards = shards
        self._stream = stream
        self._size_limits = size_limits
        self._store = store
        self._subset = subset
        self._on_open = on_open
        # The shard that is read now.
        self.url = ""
        self.epoch, self.index = start
        # The items of the window that is being given out, with their epochs. The next one is last.
        self._ready: list[tuple[int, Segment, RawSample]] = []
        self._ready_bytes = 0
        # The segment that the caller gives up. Its other samples count as lost, by the reason `fruitless_shard`.
        self.abandoned: Segment | None = None
        # All items from the position on, with their segments.
        self.items = self._items()

    def _items(self) -> Generator[tuple[Segment, RawSample], None, None]:
        skip = self.index
        order = self._shards.order
        assert not isinstance(order, WeightedSources), "each source has a reader of its own"
        for epoch in count(self.epoch):
            for segment in order.segments(self._stream, epoch, skip):
                yield from self._read(epoch, segment)
            skip = 0

    def _read(self, epoch: int, segment: Segment) -> Generator[tuple[Segment, RawSample], None, None]:
        """Read a segment window by window.

        Each sample that is read yields one item of the previous window, which spreads requests evenly. It yields more
        while both windows would hold over WINDOW_BYTES.
        """
        url = self._shards.urls[segment.shard]
        windows = WindowCursor(segment, self._shards.window, self._shards.order.seed)
        problem = ReadProblem()
        reader = self._open(url, problem, windows)
        try:
            has_more = True
            while has_more:
                raws, window_bytes = yield from self._read_window(reader, windows)
                closed = window_bytes > WINDOW_BYTES and len(raws) < windows.size
                if closed and windows.is_part:  # a smaller window needs other samples: read it again
                    windows.resize(len(raws))
                    reader.close()
                    reader = self._open(url, problem, windows)
                    for _ in islice(reader, windows.start):
                        self._store.poll()
                    continue
                ended = segment.count is None and len(raws) < windows.size and not closed
                if closed or ended:
                    windows.resize(len(raws))
                lost = RawSample.lost(url, problem.reason or "missing_from_shard", problem.detail or url)
                items = [raws[i] if i < len(raws) else lost for i in windows.order]
                has_more = windows.advance() and not ended
                if ended:
                    items += _damage(windows, problem, url)
                while self._ready:
                    yield self._next_ready()
                self._ready = [(epoch, segment, item) for item in reversed(items)]
                self._ready_bytes = sum(item.num_bytes for item in items)
        finally:
            reader.close()

    def _read_window(
        self, reader: Iterator[RawSample], windows: WindowCursor
    ) -> Generator[tuple[Segment, RawSample], None, tuple[list[RawSample], int]]:
        """Read the current window, up to WINDOW_BYTES. Yields items of the previous one meanwhile. Returns the samples
        and their bytes."""
        raws = []
        window_bytes = 0
        for raw in islice(reader, windows.size):
            self._store.poll()
            raws.append(raw)
            window_bytes += raw.num_bytes
            yield from self._drain_ready(window_bytes)
            if window_bytes > WINDOW_BYTES or windows.segment is self.abandoned:
                break
        return raws, window_bytes

    def _drain_ready(self, window_bytes: int) -> Iterator[tuple[Segment, RawSample]]:
        """Give out one item, and more until the rest and `window_bytes` bytes fit into WINDOW_BYTES."""
        while self._ready:
            yield self._next_ready()
            if self._ready_bytes + window_bytes <= WINDOW_BYTES:
                break

    def _next_ready(self) -> tuple[Segment, RawSample]:
        epoch, segment, item = self._ready.pop()
        self._ready_bytes -= item.num_bytes
        if epoch != self.epoch:
            self.epoch = epoch
            self.index = 0
        self.index += 1
        if segment is self.abandoned:
            item = RawSample.lost(item.url, "fruitless_shard", item.url)
        return segment, item

    def _open(self, url: str, problem: ReadProblem, windows: WindowCursor) -> Generator[RawSample, None, None]:
        self.url = url
        self._on_open(url)
        offsets = partial(index.sample_offsets, count=self._store.count)
        return read_shard(
            url, problem, windows.needs, self._size_limits, store=self._store, subset=self._subset, offsets=offsets
        )
