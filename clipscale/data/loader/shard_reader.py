"""Reads the samples of one shard stream in their order. A shard is read in windows, and each window has a random order.

A stream of weighted sources takes every sample from one of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np

from clipscale.data.order import WINDOW, Epochs, Mixed, Order, Segment, fingerprint, permutation
from clipscale.data.sample import RawSample
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
    window: int  # samples in a shuffle window
    seed: int

    @property
    def streams(self) -> int:
        return self.order.streams

    @property
    def samples(self) -> int | None:
        """Samples of an epoch over all streams; None where shards are drawn with replacement."""
        return sum(self.order.counts) if isinstance(self.order, Epochs) else None

    def fingerprint(self) -> str:
        """A digest of everything that a position refers to. The shards' folder is not part of it."""
        return fingerprint(self.order, [unsigned(url).rsplit("/", 1)[-1] for url in self.urls], self.window)

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
        self._begin = self._number = 0  # the current window's first place, and its number
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
                    # The window is smaller than assumed, so other samples of it are needed: it is read again.
                    if others_read:
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
        return read_shard(
            self._url, self._problem, self._wants, self._kinds, lazy=True, store=self._store, indexed=True
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
    """A shard stream, and how far it has been read: its epoch, and samples read in that epoch, broken ones included."""

    stream: int
    epoch: int
    index: int
    sources: tuple[int, ...] = ()
    """With data.weights: `index` counts usable samples, and each source has its own epoch and index here, one after the other."""


class ItemReader(ABC):
    """Reads one shard stream, item after item. `epoch` and `index` are its position, counted in items given out."""

    def __init__(self, start: StreamPosition, kinds: Mapping[str, int]) -> None:
        self._stream, self._kinds = start.stream, kinds
        self.epoch, self.index = start.epoch, start.index
        self._items = self._read()

    @property
    def position(self) -> StreamPosition:
        return StreamPosition(self._stream, self.epoch, self.index)

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
        super().__init__(start, kinds)
        self._shards, self._store = shards, store
        self._segment_reader: SegmentReader | None = None

    def _read(self) -> Generator[tuple[Segment, Item], None, None]:
        """For every item given out, reads one sample of the next window, while the two windows together hold WINDOW_BYTES at most.

        So requests to the storage are spread evenly, and memory holds about one window.
        """
        following: tuple[int, Segment, list[Item]] | None = None
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

    def _windows(self) -> Generator[tuple[int, Segment, list[Item]] | None, None, None]:
        """Epoch, segment and items of window after window, and None after every sample read."""
        shards = self._shards
        for epoch, segment in self._segments():
            url = shards.urls[segment.shard]
            reader = SegmentReader(segment, url, shards.window, shards.seed, self._kinds, self._store)
            self._segment_reader = reader
            for items in reader.windows():
                yield None if items is None else (epoch, segment, items)

    def _segments(self) -> Iterator[tuple[int, Segment]]:
        """The segments from the current position on, each with its epoch."""
        skip, order = self.index, self._shards.order
        assert not isinstance(order, Mixed), "each source has a reader of its own"
        for epoch in count(self.epoch):
            yield from ((epoch, segment) for segment in order.segments(self._stream, epoch, skip))
            skip = 0


class MixedReader(ItemReader):
    """Reads a shard stream of several weighted sources. Each source has a ShardReader, and its share of the shuffle window by weight."""

    def __init__(
        self, shards: OrderedShards, start: StreamPosition, kinds: Mapping[str, int], open_store: Callable[[], Store]
    ) -> None:
        super().__init__(start, kinds)
        assert isinstance(shards.order, Mixed)
        self._order = shards.order
        places = start.sources or (0, 0) * len(self._order.weights)
        self._starts = [StreamPosition(start.stream, *place) for place in zip(places[::2], places[1::2])]
        self._readers: dict[int, ShardReader] = {}
        self._shards, self._open_store = shards, open_store

    @property
    def position(self) -> StreamPosition:
        places = [self._readers[n].position if n in self._readers else start for n, start in enumerate(self._starts)]
        return StreamPosition(
            self._stream, 0, self.index, tuple(n for place in places for n in (place.epoch, place.index))
        )

    def used(self) -> None:
        self.index += 1

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _read(self) -> Generator[tuple[Segment, Item], None, None]:
        """The next item of the source that the place belongs to. An item that is not usable is replaced by the same source's next."""
        while True:
            source = self._order.source(self._stream, self.index)
            if source not in self._readers:
                self._readers[source] = self._open(source)
            yield self._readers[source].next_item()

    def _open(self, source: int) -> ShardReader:
        share = self._order.weights[source] / sum(self._order.weights)
        window = max(1, round(self._shards.window * share))
        shards = replace(self._shards, order=self._order.within(source), window=window)
        return ShardReader(shards, self._starts[source], self._kinds, self._open_store())
