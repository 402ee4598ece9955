"""One lane's samples in their order, and the part of every batch that one worker fills from its lanes.

The order of raw samples is fixed by order.py; broken ones are passed over here, so each lane decides by itself what it gives next.

C: channels, S: side in pixels, T: tokens.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise

import numpy as np

from clipscale.data.decode import BrokenSampleError, image_bytes
from clipscale.data.filters import Selection
from clipscale.data.loader.host_batch import Arena, Slot, sample_id
from clipscale.data.loader.offload import Transform, tier_of
from clipscale.data.order import AUGMENT, CAPTION, WINDOW, CounterRNG, Order, Segment, local_places, permutation
from clipscale.data.sample import RawSample, limits
from clipscale.data.shards import index
from clipscale.data.shards.access import EVENT, Access
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store
from clipscale.errors import UserError

MOST_BROKEN = 20_000
MOST_FRUITLESS = 200
"""A lane gives up after so many broken samples, or so many visits to shards, without a usable sample between them. Generous, since one
bad shard of ten thousand must not end a run, and a lane of a small set may hold a single sample an epoch."""


WINDOW_BYTES = 128 << 20
"""Of a shard's samples in a window of the shuffle, which is full then, however few they are. Ordinary data does not come to it: that would
take half a megabyte a sample in windows of 256. About as much is what a lane has in memory at most, this window and the next together."""
ORDER_VERSION = 1
"""Of what this file and order.py make of the settings: to be raised by a change that gives any sample another place."""

MOST_AWAY = 3
"""A lane gives up when so many shards on end stayed away for all of `data.retries`: the storage is gone, not a shard."""

TRUNCATED = "truncated_caption"
"""What captions are counted as whose tokens fill the whole context: cut, or exactly as long."""


def windows() -> str:
    """What the order within a shard depends on besides the settings; a checkpoint notes it."""
    return f"{ORDER_VERSION}:{WINDOW_BYTES}"


@dataclass(frozen=True)
class Lost:
    """A place in the order whose sample cannot be read."""

    reason: str
    detail: str


Tick = Callable[[], None]
_Window = tuple[int, Segment, list[RawSample | Lost]]
"""Turn, segment and items."""


def segment_windows(
    segment: Segment, url: str, window: int, seed: int, kinds: Mapping[str, int], store: Store
) -> Iterator[list[RawSample | Lost] | int]:
    """The segment's places in emission order: the shard is read in windows of `window` samples, each in a random order.

    A window is full earlier when its samples lie over WINDOW_BYTES of the shard: those of all its samples, whether they are part of the
    segment or not and whatever is wanted of them, so that windows are the same whoever reads, from wherever, with an index or without.

    Yields the bytes kept after every sample read, so that the caller may do something else meanwhile, and the items of every window when
    it is complete. Only places inside the segment are kept in memory or yielded. One item per place where the count is known (samples
    beyond it are not part of the order, but noted in the tally); where it is not, a shard that ends badly yields one Lost more.
    """
    problem = ReadProblem()
    begin = number = 0
    wanted: set[int] | None = None

    def want(index: int) -> bool:
        # without a count the order within the window is not known yet, but windows before the segment are
        return begin + window > segment.start if wanted is None else index - begin in wanted

    def opened() -> Generator[RawSample, None, None]:
        offsets = partial(index.sample_offsets, cache=store.access.cache)
        return read_shard(url, problem, want, kinds, lazy=True, store=store, offsets=offsets)

    def chosen(size: int) -> np.ndarray:
        """The window's samples that are part of the segment, in their order, if it has so many."""
        last = size if segment.stop is None else min(segment.stop - begin, size)
        order = permutation(size, seed, WINDOW, segment.epoch, segment.shard, number)
        return order[max(segment.start - begin, 0) : last]

    reader = opened()
    try:
        while segment.stop is None or begin < segment.stop:
            size = window if segment.count is None else min(window, segment.count - begin)
            places = chosen(size)
            wanted = None if segment.count is None else set(places.tolist())
            raws, full = yield from _next_window(reader, size, store)
            if full or segment.count is None:
                others = wanted is not None and 0 < len(wanted) < size
                size = len(raws)
                places = chosen(size)
                if others:  # had it been known that the window has fewer samples, others of them would have been read
                    reader.close()
                    reader, wanted, raws = opened(), set(places.tolist()), []
                    for _ in islice(reader, begin):
                        store.tick()
                        yield 0
                    raws, _ = yield from _next_window(reader, size, store)
            lost = Lost(problem.reason or "missing_from_shard", problem.detail or url)
            yield [raws[place] if place < len(raws) else lost for place in places]
            begin, number = begin + size, number + 1
            if segment.count is None and size < window and not full:
                if begin == 0 and not problem.reason:
                    problem = ReadProblem("empty_shard", url)
                if problem.reason and begin >= segment.start:
                    yield [Lost(problem.reason, problem.detail)]
                return
        if segment.stop == segment.count and (surplus := sum(1 for _ in reader)):
            store.counts["not_in_count"] += surplus
    finally:
        reader.close()


def _next_window(
    reader: Iterator[RawSample], size: int, store: Store
) -> Generator[int, None, tuple[list[RawSample], bool]]:
    """The next samples of a shard, `size` or what there is of them, and whether their bytes have made the window full before that.

    Yields what each takes in memory."""
    raws: list[RawSample] = []
    extent = 0
    for raw in islice(reader, size):
        store.tick()
        raws.append(raw)
        extent += raw.extent
        yield kept(raw)
        if extent > WINDOW_BYTES:
            return raws, len(raws) < size
    return raws, False


def kept(item: RawSample | Lost) -> int:
    """Bytes that a sample takes in memory, at most."""
    return item.extent if isinstance(item, RawSample) and (item.members or item.deferred) else 0


@dataclass(frozen=True)
class LaneShare:
    """A lane, and where it stands: turn, and samples taken from it."""

    lane: int
    turn: int
    index: int


@dataclass(frozen=True)
class Plan:
    """All that a worker needs to know; goes to it by pickle."""

    urls: tuple[str, ...]
    order: Order
    window: int
    seed: int
    transform: Transform
    image_types: tuple[str, ...]
    """Members of a sample of which the first there is goes to `transform`."""
    most: int
    """Bytes that such a member may have."""
    tokenizer: Callable[[list[str]], object]
    selection: Selection
    access: Access
    shares: tuple[LaneShare, ...]
    rank: int
    world: int
    room: tuple[int, int]
    """This worker's places in the largest batch, counted on from those of the workers before it."""
    piece: int

    def places(self, batch: int) -> list[np.ndarray]:
        """The places that each of the lanes fills in the local part of a global batch of that size."""
        spans = (local_places(s.lane, self.order.streams, batch, self.rank, self.world) for s in self.shares)
        return [np.arange(span.start, span.stop) for span in spans]


class LaneReader:
    """Gives one usable sample after another; `turn` and `index` say how far the lane has come, in raw samples."""

    def __init__(self, plan: Plan, share: LaneShare, broken: Counter[str], tick: Tick) -> None:
        self._plan, self.lane, self._broken = plan, share.lane, broken
        self._store = Store(plan.access, broken, tick)
        self._kinds = limits(plan.image_types, plan.selection.members(), plan.most)
        self.turn, self.index = share.turn, share.index
        self._samples = self._walk()
        self._row: Counter[str] = Counter()
        self._visits: set[tuple[int, int]] = set()
        self._away: set[tuple[int, int]] = set()
        self._read = 0

    def _segments(self) -> Iterator[tuple[int, Segment]]:
        """What is to be read from here on, each with its turn."""
        turn, index = self.turn, self.index
        while True:
            for segment in self._plan.order.segments(self.lane, turn, index):
                yield turn, segment
            turn, index = turn + 1, 0

    def _windows(self) -> Generator[_Window | int, None, None]:
        """Window after window, and the bytes of every sample read on the way to the next."""
        plan, store = self._plan, self._store
        try:
            for (turn, segment), (_, following) in pairwise(self._segments()):
                url = plan.urls[segment.shard]
                store.expect(plan.urls[following.shard])
                for items in segment_windows(segment, url, plan.window, plan.seed, self._kinds, store):
                    yield items if isinstance(items, int) else (turn, segment, items)
        finally:
            store.expect(None)

    def _walk(self) -> Generator[tuple[Segment, RawSample | Lost], None, None]:
        """Item after item. With each that is given a sample of the next window is read, so that the storage is asked evenly, not for a
        window at a time, and what is in memory is still about one window; none while that is WINDOW_BYTES."""
        coming: _Window | None = None
        held = read = 0
        with closing(self._windows()) as windows:
            while True:
                while coming is None:
                    coming, read = _one_more(windows, read)
                turn, segment, items = coming
                coming, held, read = None, sum(map(kept, items)), 0
                items.reverse()
                while items:
                    if coming is None and held + read <= WINDOW_BYTES:
                        coming, read = _one_more(windows, read)
                    if turn != self.turn:
                        self.turn, self.index = turn, 0
                    self.index += 1
                    item = items.pop()
                    held -= kept(item)
                    yield segment, item

    def close(self) -> None:
        """Close the shard, and call off what was asked for ahead."""
        self._samples.close()
        self._store.collect()

    def take(self, put: Callable[[bytes, CounterRNG], None]) -> tuple[str, int]:
        """Give the next usable sample's picture to `put`; returns its caption and its id. Raises UserError."""
        plan = self._plan
        while True:
            segment, item = next(self._samples)
            try:
                if isinstance(item, Lost):
                    raise BrokenSampleError(item.reason, item.detail)
                item.load()
                if item.damage:
                    raise BrokenSampleError(item.damage, item.detail)
                place = segment.epoch, segment.shard, item.index
                caption = plan.selection.caption(item.members, CounterRNG(plan.seed, CAPTION, *place))
                plan.selection.check(item, caption)
                rng = CounterRNG(plan.seed, AUGMENT, *place)
                put(image_bytes(item.members, plan.image_types), rng)
            except BrokenSampleError as error:
                self._pass_over(error, segment, item)
                continue
            if self._row:
                self._row.clear()
                self._visits.clear()
                self._away.clear()
                self._read = 0
            return caption, sample_id(item.url, item.key)

    def _pass_over(self, error: BrokenSampleError, segment: Segment, item: RawSample | Lost) -> None:
        self._broken[error.reason] += 1
        self._row[error.reason] += 1
        self._visits.add((segment.epoch, segment.shard))
        self._read += isinstance(item, RawSample)
        if isinstance(item, RawSample):
            self._away.clear()
        elif error.reason == "unreachable_shard":
            self._away.add((segment.epoch, segment.shard))
            if len(self._away) >= MOST_AWAY:
                raise UserError(
                    f"data.train: {MOST_AWAY} shards in a row cannot be reached, each asked for data.retries={self._plan.access.retries} "
                    f"times more (the last: {error}); go on with resume=auto when the storage is back, or raise data.retries"
                )
        if len(self._visits) > MOST_FRUITLESS or self._read > MOST_BROKEN:
            reasons = ", ".join(f"{reason} {n}" for reason, n in self._row.most_common())
            example = f"{item.url} {item.key}: {error}" if isinstance(item, RawSample) else str(error)
            raise UserError(
                f"data.train: no usable sample among the last {self._row.total()} of one lane ({reasons}; the last: {example}); "
                "look at the shards, and at data.caption_key, data.filter and data.image_features"
            )


def _one_more(windows: Iterator[_Window | int], read: int) -> tuple[_Window | None, int]:
    """Read one sample on: the window that is complete with it or None, and how many bytes have been read for it."""
    found = next(windows)
    return (None, read + found) if isinstance(found, int) else (found, read)


def last_place(tokenizer: Callable[[list[str]], object], length: int) -> tuple[int, int]:
    """The last of a row's `length` places that tells a caption that fills the context from shorter ones, and these ones' padding there.

    Not the last of all where each row ends with the same token: with a class token, or with an end that is also the padding (SigLIP's)."""
    short, full = (np.asarray(tokenizer([text]))[0] for text in ("a", "aa " * length))
    place = max(np.flatnonzero(short != full), default=length - 1)
    return int(place), int(short[place])


class Producer:
    """Fills one worker's places of every local batch, in the order of its lanes."""

    def __init__(self, plan: Plan, arena: Arena, tick: Tick) -> None:
        self.broken: Counter[str] = Counter()
        """Reason -> count since the caller last cleared it; what begins with EVENT cost no sample."""
        self.tier = tier_of(arena, plan.transform, plan.room)
        self._plan, self._tick = plan, tick
        self._last, self._padding = last_place(plan.tokenizer, arena.layout.context_length)
        self._lanes = [LaneReader(plan, share, self.broken, tick) for share in plan.shares]

    def fill(self, slot: Slot, batch: int) -> Iterator[int]:
        """Fill this worker's places of a global batch of that size; after every piece, yields how many of them are done.

        Raises UserError.
        """
        work = [(lane, int(place)) for lane, places in zip(self._lanes, self._plan.places(batch)) for place in places]
        self.tier.begin(slot)
        for start in range(0, len(work), self._plan.piece):
            piece = work[start : start + self._plan.piece]
            captions = []
            for lane, place in piece:
                self._tick()
                caption, slot["ids"][place] = lane.take(partial(self.tier.put, slot, place))
                captions.append(caption)
            tokens = np.asarray(self._plan.tokenizer(captions))
            if full := int((tokens[:, self._last] != self._padding).sum()):
                self.broken[EVENT + TRUNCATED] += full
            slot["tokens"][[place for _, place in piece]] = tokens
            yield start + len(piece)

    def positions(self) -> dict[int, tuple[int, int]]:
        """Lane -> (turn, index), after what has been filled so far."""
        return {reader.lane: (reader.turn, reader.index) for reader in self._lanes}

    def close(self) -> None:
        """Close the shards; nothing can be filled afterwards."""
        for lane in self._lanes:
            lane.close()
