"""Decodes the usable samples of a shard stream, and fills one worker's rows of every batch from its streams.

data/order.py fixes the order of all samples. Each stream skips its broken samples by itself: no stream depends on
another.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from clipscale.common.errors import DataError, LoaderError
from clipscale.common.poll import Poll
from clipscale.data.filters import Selection, sample_name
from clipscale.data.hashing import hash64
from clipscale.data.loader.host_batch import Arena
from clipscale.data.loader.position import StreamPosition
from clipscale.data.loader.shard_reader import OrderedShards, ShardReader
from clipscale.data.order import AUGMENT, CAPTION, NEGATIVE, WEIGHT, BatchShare, CounterRNG, Segment, WeightedSources
from clipscale.data.sample import IMAGE_TYPES, BrokenSampleError, RawSample, image_bytes, size_limits_of
from clipscale.data.sentences import draw_part
from clipscale.data.shards.store import RETRIES, Store
from clipscale.data.shards.subset import Subset
from clipscale.data.shards.unusable import json_remedy, why_unusable
from clipscale.data.train_transform import TrainTransform

# Takes a phrase for messages: which shard or sample is being read.
SetStatus = Callable[[str], None]
# A stream leaves a shard after this many broken samples in a row.
MAX_BROKEN_IN_SHARD = 20_000
# A stream gives up after MAX_BROKEN broken samples in a row, or after MAX_UNUSABLE_SEGMENTS segments in a row without a
# usable sample. The limits are generous: one bad shard of a few must not end a run, and a stream of a small set may
# hold a single sample an epoch.
MAX_BROKEN = 200_000
MAX_UNUSABLE_SEGMENTS = 200
# A stream gives up after this many unreachable shards in a row: the storage is gone, not a shard.
MAX_UNREACHABLE = 3


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a worker needs. It is sent by pickle."""

    shards: OrderedShards
    # The samples that are taken; None: all.
    subset: Subset | None
    # Whether a sample may come several times in an epoch. It has the same key each time.
    repeats_samples: bool
    # Seconds without progress after which the worker ends the run.
    timeout_s: float
    transform: TrainTransform
    tokenizer: Callable[[list[str]], Tensor]  # captions -> tokens
    pad: int  # the padding token
    eos_is_pad: bool  # whether a caption ends with the padding token, too
    selection: Selection
    start_of: dict[int, StreamPosition]  # id of each of the worker's shard streams -> its start
    share: BatchShare
    samples_per_report: int

    def fits_context(self, caption: str) -> bool:
        """Whether the whole caption fits the context. False if it fills the context: it may then have been cut off."""
        tokens = np.asarray(self.tokenizer([caption]))
        return int(self.lengths(tokens)[0]) < tokens.shape[1]

    def lengths(self, tokens: np.ndarray) -> np.ndarray:
        """(N, T) -> (N,) int: the tokens of each caption, its end token among them."""
        return lengths(tokens, self.pad, eos_is_pad=self.eos_is_pad)

    def rows(self) -> list[np.ndarray]:
        """The rows that each stream fills, counted in the local batch. Rows outside this batch are another rank's."""
        count = self.shards.order.num_streams
        return [np.array(self.share.rows(stream_id, count)) for stream_id in self.start_of]


class SampleAnnotations(NamedTuple):
    """What a decoded sample has beside its pixels."""

    # The sample's captions, then its hard negatives.
    texts: list[str]
    # Equal for samples that are the same by `data.same`.
    sameness_key: int
    # One array (2, D) for each teacher.
    teacher_features: list[np.ndarray]


class ShardStream:
    """The usable samples of a shard stream, one after another. `open_shard_stream` makes it."""

    def __init__(
        self,
        spec: WorkerSpec,
        stream_id: int,
        readers: Sequence[ShardReader],
        store: Store,
        broken: Counter[str],
        set_status: SetStatus,
    ) -> None:
        """`readers`: one for each source. `broken` receives the skipped samples by reason."""
        self._spec = spec
        self._stream_id = stream_id
        self._readers = readers
        self._store = store
        self._broken = broken
        self._set_status = set_status
        # The usable samples given out so far. With data.weights this number decides the source of the next sample;
        # otherwise it is unused.
        self._used = spec.start_of[stream_id].samples
        # Reason -> broken samples since the last usable sample.
        self._reasons: Counter[str] = Counter()
        # Segment, by its shuffle key and its shard -> broken samples that were read in it since the last usable sample.
        self._segments: Counter[tuple[int, int]] = Counter()
        # Segments of shards that could not be reached since the last usable sample.
        self._unreachable: set[tuple[int, int]] = set()

    @property
    def position(self) -> StreamPosition:
        """The position after the samples taken so far."""
        if isinstance(self._spec.shards.order, WeightedSources):
            sources = tuple((reader.epoch, reader.index) for reader in self._readers)
            return StreamPosition(0, self._used, sources)
        reader = self._readers[0]
        return StreamPosition(reader.epoch, reader.index)

    def next_sample(self, row: np.ndarray) -> SampleAnnotations:
        """Write the next usable sample's pixels to `row`; returns the rest. Counts the samples that it skips.

        With weights, the next sample of the same source replaces a broken one. Raises UserError if the stream gives up.
        """
        order = self._spec.shards.order
        source = order.source(self._stream_id, self._used) if isinstance(order, WeightedSources) else 0
        reader = self._readers[source]
        while True:
            self._set_status(f", reading {reader.url}")
            segment, item = next(reader.items)
            name = sample_name(item)
            self._set_status(f", at sample {name} (data.filter='sample!={name}' leaves it out)")
            try:
                sample = self._decode(segment, item, row)
            except BrokenSampleError as error:
                self._broken[error.reason] += 1
                if self._count_broken(error, segment, item) > MAX_BROKEN_IN_SHARD:
                    reader.abandoned = segment
                continue
            if sample is not None:
                self._used += 1
                self._forget_skipped()
                return sample

    def _decode(self, segment: Segment, item: RawSample, row: np.ndarray) -> SampleAnnotations | None:
        """Write a sample's pixels to `row`; returns the rest, or None if sample weights leave it out of this epoch.

        All its random numbers depend on its place alone. Raises BrokenSampleError.
        """
        if item.error:
            raise BrokenSampleError(item.error, item.detail)
        spec = self._spec
        seed = spec.shards.order.seed
        if item.keep_probability < 1:
            draw = CounterRNG(seed, WEIGHT, segment.shuffle_key, hash64(item.key))
            if draw.uniform() >= item.keep_probability:
                return None
        place = segment.shuffle_key, segment.shard, item.index
        rng = CounterRNG(seed, CAPTION, *place)
        captions = spec.selection.draw(item.members, rng)
        spec.selection.check(item, [caption for caption, _ in captions])
        negatives = spec.selection.draw_negatives(item.members, CounterRNG(seed, NEGATIVE, *place))
        fallback_number = item.key if spec.repeats_samples else item.index
        sameness_key = spec.selection.sameness_key(item, captions[0][0], f"{segment.shard} {fallback_number}")
        features = [teacher.of(item.members) for teacher in spec.shards.teachers]
        texts = [draw_part(text, part, rng, spec.fits_context) if part else text for text, part in captions]
        spec.transform(image_bytes(item.members), CounterRNG(seed, AUGMENT, *place), row)
        return SampleAnnotations(texts + negatives, sameness_key, features)

    def close(self) -> None:
        for reader in self._readers:
            reader.items.close()

    def _forget_skipped(self) -> None:
        self._reasons.clear()
        self._segments.clear()
        self._unreachable.clear()

    def _count_broken(self, error: BrokenSampleError, segment: Segment, item: RawSample) -> int:
        """Count a broken sample. Returns how many its shard has given in a row. Raises UserError if the stream gives
        up."""
        place = segment.shuffle_key, segment.shard
        self._reasons[error.reason] += 1
        self._segments.setdefault(place, 0)  # a segment counts, even if none of its samples was read
        if not item.is_missing:
            self._segments[place] += 1
            self._unreachable.clear()
        elif error.reason == "unreachable_shard":
            self._unreachable.add(place)
        if len(self._unreachable) >= MAX_UNREACHABLE:
            raise LoaderError(
                f"data.train: {MAX_UNREACHABLE} shards in a row cannot be reached, each asked {RETRIES} times more "
                f"(the last: {error}); continue with resume=auto when the storage is back"
            )
        if len(self._segments) > MAX_UNUSABLE_SEGMENTS or self._segments.total() > MAX_BROKEN:
            reasons = ", ".join(f"{reason} {count}" for reason, count in self._reasons.most_common())
            captions = [source.name for source in self._spec.selection.captions]
            holds = why_unusable(item.url, captions, self._store) or json_remedy(item.url, captions, self._store)
            raise DataError(
                f"data.train: no usable sample among the last {self._reasons.total()} of one shard stream ({reasons}; "
                f"the last: {item.url} {item.key}: {error}); "
                + (holds or "look at the shards, and at data.captions and data.filter")
            )
        return self._segments[place]


def open_shard_stream(
    spec: WorkerSpec, stream_id: int, store: Store, broken: Counter[str], set_status: SetStatus
) -> ShardStream:
    """Open a shard stream at its start in `spec`. `store` opens the shards; `broken` counts the skipped samples."""
    sources = spec.shards.sources
    start = spec.start_of[stream_id]
    if not isinstance(spec.shards.order, WeightedSources):
        starts = [(start.epoch, start.samples)]
    elif start.sources:
        starts = list(start.sources)
    else:
        starts = [(0, 0)] * len(sources)
    teacher_members = {teacher.member for teacher in spec.shards.teachers}
    size_limits = size_limits_of(IMAGE_TYPES, spec.selection.extensions_to_read() | teacher_members)
    readers = [
        ShardReader(
            source,
            stream_id,
            start=position,
            size_limits=size_limits,
            store=store,
            subset=spec.subset,
            on_open=lambda url: set_status(f", reading {url}"),
        )
        for source, position in zip(sources, starts, strict=True)
    ]
    return ShardStream(spec, stream_id, readers, store, broken, set_status)


def lengths(tokens: np.ndarray, pad: int, *, eos_is_pad: bool = False) -> np.ndarray:
    """(N, T) -> (N,) int: tokens of each caption up to the last that is not padding; 0 for an empty caption.

    `eos_is_pad`: the first token of the padding is the caption's end token, which counts.
    """
    counts = np.arange(1, tokens.shape[1] + 1)
    used: np.ndarray = np.where(tokens != pad, counts, 0).max(axis=1)
    return np.minimum(used + 1, tokens.shape[1]) if eos_is_pad else used


def eos_is_pad(empty: np.ndarray, other: np.ndarray, pad: int) -> bool:
    """Whether captions end with the padding token, given the tokens (T,) of an empty caption and of another one.

    An end token that is not the padding is the last other token of both.
    """
    ends = [row[max(int(lengths(row[None], pad)[0]) - 1, 0)] for row in (empty, other)]
    return bool(ends[0] != ends[1])


@dataclass(frozen=True)
class Report:
    """A worker's message: it has filled `done` of its rows of batch `step`. Step -1: it is alive."""

    step: int
    done: int
    # Since the last report: skipped samples by reason, and faults that cost no sample.
    broken: Counter[str]
    faults: Counter[str]
    # The positions of its streams after the batch; only in a batch's last report.
    positions: dict[int, StreamPosition] | None = None


class BatchFiller:
    """Fills one worker's rows of every local batch from its shard streams. `open_filler` makes it."""

    def __init__(
        self, spec: WorkerSpec, arena: Arena, store: Store, broken: Counter[str], streams: Mapping[int, ShardStream]
    ) -> None:
        """`store`: opens the streams' shards. `broken`: counts the samples that the streams skip."""
        self._spec = spec
        self._arena = arena
        self._store = store
        self._broken = broken
        self.streams = streams
        self._discarded_pixels = np.empty(spec.transform.shape, np.uint8)  # takes the pixels of another rank's samples

    def set_poll(self, poll: Poll) -> None:
        """From now on, call `poll` between samples and while the storage is waited for."""
        self._store.poll = poll

    def fill(self, step: int) -> Iterator[Report]:
        """Fill this worker's rows of a batch. Yields a report after every `samples_per_report` samples, and one with
        the positions.

        If two ranks read a stream, each also decodes the other's samples and drops them, so that both skip the same
        broken ones. Raises UserError.
        """
        slot = self._arena.slot(step)
        local = range(self._spec.share.local_batch)
        work = []
        for stream, stream_rows in zip(self.streams.values(), self._spec.rows()):
            work += [(stream, int(row)) for row in stream_rows]
        for start in range(0, len(work), self._spec.samples_per_report):
            part = work[start : start + self._spec.samples_per_report]
            texts: dict[int, str] = {}  # row of the tokens -> its text
            for stream, row in part:
                self._store.poll()
                is_own = row in local
                sample = stream.next_sample(slot["pixels"][row] if is_own else self._discarded_pixels)
                if is_own:
                    texts.update(zip(self._arena.layout.text_rows(row), sample.texts, strict=True))
                    slot["sameness_keys"][row] = sample.sameness_key
                    for teacher, features in zip(self._spec.shards.teachers, sample.teacher_features, strict=True):
                        slot[teacher.member][row] = features
            if texts:
                tokens = np.asarray(self._spec.tokenizer(list(texts.values())))
                rows = list(texts)
                slot["tokens"][rows] = tokens
                slot["lengths"][rows] = self._spec.lengths(tokens)
            yield self.report(step, start + len(part))
        positions = {stream_id: stream.position for stream_id, stream in self.streams.items()}
        yield replace(self.report(step), positions=positions)

    def report(self, step: int = -1, done: int = 0) -> Report:
        """A report with the counts since the last one. Clears the counts."""
        report = Report(step, done, Counter(self._broken), Counter(self._store.faults))
        self._broken.clear()
        self._store.faults.clear()
        return report

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()


def open_filler(spec: WorkerSpec, arena: Arena, poll: Poll, set_status: SetStatus = lambda text: None) -> BatchFiller:
    """Open one worker's streams, which then can fill its rows. `poll`: see `BatchFiller.set_poll`."""
    store = Store(poll, spec.timeout_s)
    broken: Counter[str] = Counter()
    streams = {stream_id: open_shard_stream(spec, stream_id, store, broken, set_status) for stream_id in spec.start_of}
    return BatchFiller(spec, arena, store, broken, streams)
