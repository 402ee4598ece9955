"""Decodes the usable samples of a shard stream, one after another.

data/order.py fixes the order of all samples. Each stream skips its broken samples by itself: no stream depends on
another.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from clipscale.data.filters import Selection, sample_name
from clipscale.data.hashing import hash64
from clipscale.data.loader.give_up import GiveUpRule
from clipscale.data.loader.position import StreamPosition
from clipscale.data.loader.shard_reader import OrderedShards, ShardReader
from clipscale.data.order import AUGMENT, CAPTION, NEGATIVE, WEIGHT, BatchShare, CounterRNG, Segment, WeightedSources
from clipscale.data.sample import IMAGE_TYPES, BrokenSampleError, RawSample, image_bytes, size_limits_of
from clipscale.data.sentences import draw_part
from clipscale.data.shards.store import Store
from clipscale.data.shards.subset import Subset
from clipscale.data.tokenizer import Padding
from clipscale.data.train_transform import TrainTransform

# Takes a phrase for messages: which shard or sample is being read.
SetStatus = Callable[[str], None]


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
    padding: Padding  # the tokenizer's
    selection: Selection
    start_by_stream: dict[int, StreamPosition]  # id of each of the worker's shard streams -> its start
    share: BatchShare
    samples_per_report: int

    def fits_context(self, caption: str) -> bool:
        """Whether the whole caption fits the context. False if it fills the context: it may then have been cut off."""
        tokens = np.asarray(self.tokenizer([caption]))
        return int(self.padding.lengths(tokens)[0]) < tokens.shape[1]

    def rows(self) -> list[np.ndarray]:
        """The rows that each stream fills, counted in the local batch. Rows outside this batch are another rank's."""
        count = self.shards.order.num_streams
        return [np.array(self.share.rows(stream_id, count)) for stream_id in self.start_by_stream]


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
        give_up_rule: GiveUpRule,
        broken: Counter[str],
        set_status: SetStatus,
    ) -> None:
        """`readers`: one for each source. `broken` receives the skipped samples by reason."""
        self._spec = spec
        self._stream_id = stream_id
        self._readers = readers
        self._broken = broken
        self._set_status = set_status
        # The usable samples given out so far. With data.weights this number decides the source of the next sample;
        # otherwise it is unused.
        self._used = spec.start_by_stream[stream_id].samples
        self._give_up_rule = give_up_rule

    @property
    def position(self) -> StreamPosition:
        """The position after the samples taken so far."""
        if isinstance(self._spec.shards.order, WeightedSources):
            sources = tuple((reader.epoch, reader.num_given_out) for reader in self._readers)
            return StreamPosition(0, self._used, sources)
        reader = self._readers[0]
        return StreamPosition(reader.epoch, reader.num_given_out)

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
                if self._give_up_rule.count_broken(error, segment, item):
                    reader.abandoned = segment
                continue
            if sample is not None:
                self._used += 1
                self._give_up_rule.count_usable()
                return sample

    def _decode(self, segment: Segment, item: RawSample, row: np.ndarray) -> SampleAnnotations | None:
        """Write a sample's pixels to `row`; returns the rest, or None if sample weights leave it out of this epoch.

        All its random numbers depend on its segment and index alone. Raises BrokenSampleError.
        """
        if item.error:
            raise BrokenSampleError(item.error, item.detail)
        spec = self._spec
        seed = spec.shards.order.seed
        if item.keep_probability < 1:
            draw = CounterRNG(seed, WEIGHT, segment.shuffle_key, hash64(item.key))
            if draw.uniform() >= item.keep_probability:
                return None
        sample_id = segment.shuffle_key, segment.shard, item.index
        rng = CounterRNG(seed, CAPTION, *sample_id)
        captions = spec.selection.draw(item.members, rng)
        spec.selection.check(item, [caption for caption, _ in captions])
        negatives = spec.selection.draw_negatives(item.members, CounterRNG(seed, NEGATIVE, *sample_id))
        fallback_number = item.key if spec.repeats_samples else item.index
        sameness_key = spec.selection.sameness_key(item, captions[0][0], f"{segment.shard} {fallback_number}")
        features = [teacher.read(item.members) for teacher in spec.shards.teachers]
        texts = [draw_part(text, part, rng, spec.fits_context) if part else text for text, part in captions]
        spec.transform(image_bytes(item.members), CounterRNG(seed, AUGMENT, *sample_id), row)
        return SampleAnnotations(texts + negatives, sameness_key, features)

    def close(self) -> None:
        for reader in self._readers:
            reader.items.close()


def open_shard_stream(
    spec: WorkerSpec, stream_id: int, store: Store, broken: Counter[str], set_status: SetStatus
) -> ShardStream:
    """Open a shard stream at its start in `spec`. `store` opens the shards; `broken` counts the skipped samples."""
    sources = spec.shards.sources
    start = spec.start_by_stream[stream_id]
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
    return ShardStream(spec, stream_id, readers, GiveUpRule(spec.selection, store), broken, set_status)
