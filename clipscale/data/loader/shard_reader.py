"""Reads the samples of one shard stream in their order. A shard is read in windows, and each window has a random order.

A stream of weighted sources takes every sample from one of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise

import numpy as np

from clipscale.data.order import WINDOW, Epochs, Mixed, Order, Segment, fingerprint, permutation
from clipscale.data.sample import RawSample
from clipscale.data.shards import index
from clipscale.data.shards.access import unsigned
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store

WINDOW_BYTES = 128 << 20
"""A shuffle window closes at this many bytes, even if it holds few samples. Ordinary data does not come to it: that would take half a
megabyte a sample in windows of 256. A stream holds about as much at most, its current window and the next one together."""
ORDER_VERSION = 1
"""The version of the order that this file and order.py make of the settings. A change that moves any sample raises it."""


def order_version() -> str:
    """What the order within a shard depends on, apart from the settings. A checkpoint records it."""
    return f"{ORDER_VERSION}:{WINDOW_BYTES}"


@dataclass(frozen=True)
class OrderedShards:
    """The shards of a run and the order of their samples."""

    urls: tuple[str, ...]
    order: Order
    window: int
    """Samples in a shuffle window."""
    seed: int

    @property
    def streams(self) -> int:
        """The number of shard streams."""
        return self.order.streams

    @property
    def samples(self) -> int | None:
        """Samples of an epoch over all streams; None where shards are drawn with replacement."""
        return sum(self.order.counts) if isinstance(self.order, Epochs) else None

    def fingerprint(self) -> str:
        """A digest of everything that a position refers to. The shards' folder is not part of it."""
        return fingerprint(self.order, [unsigned(url).rsplit("/", 1)[-1] for url in self.urls], self.window)

    def former_fingerprint(self) -> str | None:
        """With data.weights: the digest of former versions, where a weight was a part of whole shards."""
        return replace(self, order=self.order.by_shard()).fingerprint() if isinstance(self.order, Mixed) else None

    def first_samples(self, count: int, kinds: Mapping[str, int], store: Store) -> Generator[RawSample, None, None]:
        """The first shard's samples, `count` of them with their members."""
        return read_shard(self.urls[0], ReadProblem(), lambda index: index < count, kinds, store=store)


@dataclass(frozen=True)
class Unreadable:
    """A place in the order whose sample cannot be read."""

    reason: str
    detail: str


Item = RawSample | Unreadable


def kept_bytes(item: Item) -> int:
    """Bytes that an item takes in memory, at most."""
    return item.extent if isinstance(item, RawSample) and (item.members or item.deferred) else 0


class SegmentReader:
    """Reads a segment of one shard, window by window.

    A window closes early when its samples take more than WINDOW_BYTES of the shard. All samples count, read or not, so windows are the
    same for every reader, from any start, with an index or without.
    """

    def __init__(
        self, segment: Segment, url: str, window: int, seed: int, kinds: Mapping[str, int], store: Store
    ) -> None:
        self._segment, self._url, self._window, self._seed, self._kinds = segment, url, window, seed, kinds
        self._store, self._problem = store, ReadProblem()
        self._begin = self._number = 0
        """The current window's first place, and its number."""
        self._wanted: set[int] | None = None
        self.pending_bytes = 0
        """Bytes in memory of the window that is being read."""

    def windows(self) -> Generator[list[Item] | None, None, None]:
        """Window after window. Yields None after every sample read, so that the caller may do other work meanwhile.

        Only places inside the segment are kept and yielded, one item per place where the shard's count is known. Samples beyond the count
        are not part of the order, but counted. Without a count, a shard that ends badly yields one more Unreadable.
        """
        segment = self._segment
        reader = self._open()
        try:
            while segment.stop is None or self._begin < segment.stop:
                size = self._window if segment.count is None else min(self._window, segment.count - self._begin)
                places = self._places(size)
                self._wanted = None if segment.count is None else set(places.tolist())
                raws, full = yield from self._read(reader, size)
                if full or segment.count is None:
                    others_read = self._wanted is not None and 0 < len(self._wanted) < size
                    size = len(raws)
                    places = self._places(size)
                    if (
                        others_read
                    ):  # the window is smaller than assumed, so other samples of it are needed: read it again
                        reader.close()
                        reader, self._wanted = self._open(), set(places.tolist())
                        for _ in islice(reader, self._begin):
                            self._store.tick()
                            yield None
                        raws, _ = yield from self._read(reader, size)
                problem = self._problem
                lost = Unreadable(problem.reason or "missing_from_shard", problem.detail or self._url)
                self.pending_bytes = 0
                yield [raws[place] if place < len(raws) else lost for place in places]
                self._begin, self._number = self._begin + size, self._number + 1
                if segment.count is None and size < self._window and not full:
                    if self._begin == 0 and not problem.reason:
                        problem = ReadProblem("empty_shard", self._url)
                    if problem.reason and self._begin >= segment.start:
                        yield [Unreadable(problem.reason, problem.detail)]
                    return
            if segment.stop == segment.count and (surplus := sum(1 for _ in reader)):
                self._store.counts["not_in_count"] += surplus
        finally:
            reader.close()

    def _open(self) -> Generator[RawSample, None, None]:
        offsets = partial(index.sample_offsets, cache=self._store.access.cache)
        return read_shard(
            self._url, self._problem, self._wants, self._kinds, lazy=True, store=self._store, offsets=offsets
        )

    def _wants(self, index: int) -> bool:
        if self._wanted is not None:
            return index - self._begin in self._wanted
        # no count: the order within the window is not known yet, but whole windows can be skipped
        return self._begin + self._window > self._segment.start

    def _places(self, size: int) -> np.ndarray:
        """The order of the window's samples that belong to the segment, if the window has `size` samples."""
        segment = self._segment
        last = size if segment.stop is None else min(segment.stop - self._begin, size)
        order = permutation(size, self._seed, WINDOW, segment.epoch, segment.shard, self._number)
        return order[max(segment.start - self._begin, 0) : last]

    def _read(self, reader: Iterator[RawSample], size: int) -> Generator[None, None, tuple[list[RawSample], bool]]:
        """The next `size` samples of the shard, or as many as it has; and whether WINDOW_BYTES closed the window before that."""
        raws: list[RawSample] = []
        extent = self.pending_bytes = 0
        for raw in islice(reader, size):
            self._store.tick()
            raws.append(raw)
            extent += raw.extent
            self.pending_bytes += kept_bytes(raw)
            yield None
            if extent > WINDOW_BYTES:
                return raws, len(raws) < size
        return raws, False


@dataclass(frozen=True)
class StreamPosition:
    """A shard stream, and how far it has been read: its epoch, and samples read in that epoch."""

    stream: int
    epoch: int
    index: int
    sources: tuple[int, ...] = ()
    """With data.weights: `index` counts usable samples, and each source has its own epoch and index here, one after the other."""


_Window = tuple[int, Segment, list[Item]]
"""The stream's epoch, the segment, and its items in this window."""


class ItemReader(ABC):
    """Reads one shard stream, item after item. `epoch` and `index` are its position, counted in items given out."""

    def __init__(self, start: StreamPosition, kinds: Mapping[str, int]) -> None:
        self._stream, self._kinds = start.stream, kinds
        self.epoch, self.index = start.epoch, start.index
        self._items = self._read()

    @property
    def position(self) -> tuple[int, ...]:
        """Epoch, and items given out in it."""
        return self.epoch, self.index

    def next_item(self) -> tuple[Segment, Item]:
        """The next item, and the segment it belongs to."""
        return next(self._items)

    def used(self) -> None:  # noqa: B027 (most readers have no need of it)
        """The last item was usable."""

    def close(self) -> None:
        """Close what is open, and cancel what was requested ahead."""
        self._items.close()

    @abstractmethod
    def _read(self) -> Generator[tuple[Segment, Item], None, None]:
        """All items from the position on."""


class ShardReader(ItemReader):
    """Reads a stream of shards."""

    def __init__(self, shards: OrderedShards, start: StreamPosition, kinds: Mapping[str, int], store: Store) -> None:
        self._shards, self._store = shards, store
        self._segment_reader: SegmentReader | None = None
        super().__init__(start, kinds)

    def close(self) -> None:
        super().close()
        self._store.collect()

    def _read(self) -> Generator[tuple[Segment, Item], None, None]:
        """For every item given out, reads one sample of the next window, while the two windows together hold WINDOW_BYTES at most.

        So requests to the storage are spread evenly, and memory holds about one window.
        """
        following: _Window | None = None
        with closing(self._windows()) as windows:
            while True:
                while following is None:
                    following = next(windows)
                (epoch, segment, items), following = following, None
                items.reverse()
                held = sum(map(kept_bytes, items))
                while items:
                    pending = self._segment_reader.pending_bytes if self._segment_reader else 0
                    if following is None and held + pending <= WINDOW_BYTES:
                        following = next(windows)
                    if epoch != self.epoch:
                        self.epoch, self.index = epoch, 0
                    self.index += 1
                    item = items.pop()
                    held -= kept_bytes(item)
                    yield segment, item

    def _windows(self) -> Generator[_Window | None, None, None]:
        """Window after window, and None after every sample read. The store learns each time which shard follows."""
        shards, store = self._shards, self._store
        try:
            for (epoch, segment), (_, following) in pairwise(self._segments()):
                url = shards.urls[segment.shard]
                store.expect(shards.urls[following.shard])
                reader = SegmentReader(segment, url, shards.window, shards.seed, self._kinds, store)
                self._segment_reader = reader
                for items in reader.windows():
                    yield None if items is None else (epoch, segment, items)
        finally:
            store.expect(None)

    def _segments(self) -> Iterator[tuple[int, Segment]]:
        """The segments from the current position on, each with its epoch."""
        epoch, index = self.epoch, self.index
        order = self._shards.order
        assert not isinstance(order, Mixed), "each source has a reader of its own"
        while True:
            for segment in order.segments(self._stream, epoch, index):
                yield epoch, segment
            epoch, index = epoch + 1, 0


class MixedReader:
    """Reads a shard stream of several weighted sources, item after item. Each source has a ShardReader of its own.

    The shuffle window is shared among the sources by their weights.
    """

    def __init__(
        self,
        shards: OrderedShards,
        start: StreamPosition,
        kinds: Mapping[str, int],
        open_store: Callable[[], Store],
    ) -> None:
        assert isinstance(shards.order, Mixed)
        self._shards, self._order, self._stream = shards, shards.order, start.stream
        self._kinds, self._open_store = kinds, open_store
        self._place = start.index
        places = start.sources or (0, 0) * len(self._order.weights)
        self._starts = [StreamPosition(start.stream, *place) for place in zip(places[::2], places[1::2])]
        self._readers: dict[int, ShardReader] = {}

    @property
    def position(self) -> tuple[int, ...]:
        """0, usable samples given out, and the epoch and index of every source."""
        places = (
            self._readers[number].position if number in self._readers else (start.epoch, start.index)
            for number, start in enumerate(self._starts)
        )
        return 0, self._place, *(value for place in places for value in place)

    def next_item(self) -> tuple[Segment, Item]:
        """The next item of the source that the place belongs to. An item that is not usable is replaced by the same source's next."""
        source = self._order.source(self._stream, self._place)
        if source not in self._readers:
            self._readers[source] = self._open(source)
        return self._readers[source].next_item()

    def used(self) -> None:
        """The last item was usable."""
        self._place += 1

    def _open(self, source: int) -> ShardReader:
        share = self._order.weights[source] / sum(self._order.weights)
        window = max(1, round(self._shards.window * share))
        shards = replace(self._shards, order=self._order.within(source), window=window)
        return ShardReader(shards, self._starts[source], self._kinds, self._open_store())

    def close(self) -> None:
        """Close the shards."""
        for reader in self._readers.values():
            reader.close()
