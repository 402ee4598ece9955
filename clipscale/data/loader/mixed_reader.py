"""Reads a shard stream of several weighted sources: each source has a reader of its own, and every sample is taken from one of them."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from clipscale.data.loader.shard_reader import Item, OrderedShards, ShardReader, StreamPosition
from clipscale.data.order import Mixed, Segment
from clipscale.data.shards.store import Store


class MixedReader:
    """As ShardReader, item after item. The shuffle window is shared among the sources by their weights."""

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
