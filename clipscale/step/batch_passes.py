"""The inputs of a batch's encoders, the message in which the ranks agree on the next batch, and the two passes.

A captioner has one encoder of pairs in the place of two towers; see `captioner_passes.py`.
N: samples of this rank, D: feature width.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypedDict

from torch import Tensor

from clipscale.batch.text_layout import TextLayout
from clipscale.common.poll import Poll
from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.loader.sorted_texts import SortedTexts
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.distributed.world import AsyncReduction, World
from clipscale.step.cache.grad_cache import GradCache

# Indices into the message. The entries from CAPTION_LABELS on are one for each rank.
TEXT_CHUNKS, IS_UNKNOWN, WANTS_SAVE, CAPTION_LABELS = range(4)


@dataclass(frozen=True)
class StepAgreement:
    """The facts of the next step on which all ranks agree: how many chunks and labels it has, and whether a checkpoint
    is saved before it. Reading a fact waits for the all-reduce.

    step n:    before the replay `start_agreement` starts the all-reduce, with this rank's counts of step n + 1
               replay, update
    step n+1:  reads `num_text_chunks` and `num_caption_labels`; 0 means unknown: the step makes its own all-reduce
    """

    # The maximum over ranks of [text chunks, is unknown, wants save], and for a captioner of one entry for each rank. A
    # rank sends the number of its caption labels in its own entry, and zeros in the entries of the others.
    message: AsyncReduction
    # This rank's next batch, on which the ranks agree, if it had arrived.
    batch: HostBatch | None = None
    # This rank's texts of the next step, if they had arrived and are sorted.
    texts: SortedTexts | None = None

    @property
    def num_text_chunks(self) -> int:
        """The most text chunks of any rank; 0 if a rank did not know its number."""
        entries = self.message.values()
        return 0 if entries[IS_UNKNOWN] else entries[TEXT_CHUNKS]

    @property
    def num_caption_labels(self) -> int:
        """The labels in the captions of all ranks; 0 if a rank did not know its number."""
        entries = self.message.values()
        return 0 if entries[IS_UNKNOWN] else sum(entries[CAPTION_LABELS:])

    @property
    def wants_save(self) -> bool:
        """Whether any rank wishes to save a checkpoint."""
        return self.message.values()[WANTS_SAVE] > 0


@dataclass
class StepInputs:
    """Builds the encoders' inputs of a batch, and keeps the ranks' agreement on the next one.

    All ranks make equally many text chunks; the agreement has the number.
    """

    world: World
    # Whether a batch's pixels and texts stay on the device between the passes.
    stays_on_device: bool
    # Whether texts, or a captioner's pairs, are sorted by length, so that they lose their padding. The features of such
    # a text tower must not depend on the padding.
    sorts_captions: bool
    # Whether sorted texts come in equally large chunks, as a captioner needs; see `SortedTexts`.
    has_equal_chunks: bool = False
    # On the next batch to be encoded; None before the first step of a start.
    agreement: StepAgreement | None = None

    def images(self, batch: HostBatch) -> ChunkLoader:
        """The image tower's input."""
        return ChunkLoader(batch.pixels, len(batch), self.world.device, stays_on_device=self.stays_on_device)

    def texts(self, batch: HostBatch, chunk_size: int) -> ChunkLoader:
        """The text tower's input; if it is sorted, in equally many chunks on all ranks.

        `chunk_size`: texts of a chunk. A collective if texts are sorted and the agreement does not have the number of
        chunks.
        """
        agreement = self.agreement
        if agreement and agreement.batch is not None:
            assert agreement.batch is batch, "the ranks have agreed on another batch"
        texts: ChunkLoader | None = agreement.texts if agreement else None
        texts = texts or self.local_texts(batch, chunk_size)
        if isinstance(texts, SortedTexts):
            num_chunks = agreement.num_text_chunks if agreement else 0
            if not num_chunks:
                [num_chunks] = self.world.all_reduce_max(texts.num_chunks)
            texts.split(num_chunks)
        return texts

    def local_texts(self, batch: HostBatch, chunk_size: int) -> ChunkLoader:
        """The text tower's input. If texts are sorted, waits for all of them, and makes this rank's own chunks."""
        device = self.world.device
        if not self.sorts_captions:
            return ChunkLoader(batch.tokens, batch.num_texts, device, stays_on_device=self.stays_on_device)
        texts = SortedTexts(
            batch.tokens,
            batch.lengths,
            batch.num_texts,
            device,
            stays_on_device=self.stays_on_device,
            has_equal_chunks=self.has_equal_chunks,
        )
        texts.make_chunks(chunk_size)
        return texts

    def num_caption_labels(self, own: int) -> int:
        """The labels in the captions of the global batch. A collective if the agreement does not have the number.

        `own`: the labels in this rank's captions.
        """
        known = self.agreement.num_caption_labels if self.agreement else 0
        return known or sum(self.world.all_reduce_max(*self.world.one_hot_by_rank(own)))

    def start_agreement(
        self, upcoming: HostBatch | None, chunk_size: int, *, wants_save: bool, caption_labels: int | None = None
    ) -> StepAgreement:
        """Begin the all-reduce of the next step's facts, and sort its texts ahead. A collective.

        Call it after the first pass of the present step, which reads the agreement that this one replaces.

        `upcoming`: the next batch, if it has arrived. `chunk_size`: texts of a chunk. `caption_labels`: of a
        captioner's next batch, 0 if it has not arrived; None without a captioner.
        """
        texts = self.local_texts(upcoming, chunk_size) if upcoming else None
        sorted_texts = texts if isinstance(texts, SortedTexts) else None
        text_chunks = sorted_texts.num_chunks if sorted_texts else 0
        labels = [] if caption_labels is None else self.world.one_hot_by_rank(caption_labels)
        is_unknown = int(upcoming is None)
        message = self.world.all_reduce_max_async(text_chunks, is_unknown, int(wants_save), *labels)
        self.agreement = StepAgreement(message, upcoming, sorted_texts)
        return self.agreement


class EncodedBatch(NamedTuple):
    """The result of a batch's first pass."""

    # The arguments of the cache's loss: images (N, D) and texts, or a captioner's pairs (N, 2, D).
    features: list[Tensor]
    # The text tower's input. If the texts are sorted, it has the width of each chunk.
    texts: ChunkLoader


class CaptionerLosses(TypedDict, total=False):
    """A captioner's two losses, unweighted. The keys are their names in metrics.jsonl."""

    contrastive_loss: float
    caption_loss: float


@dataclass(frozen=True)
class StepLoss:
    """The loss of the global batch, on the device, and what its numbers mean on the host."""

    # 0-d, the loss of the features.
    contrastive: Tensor
    # 0-d, a captioner's mean cross entropy; None if there is none.
    caption: Tensor | None = None
    caption_weight: float = 0.0

    @property
    def tensors(self) -> list[Tensor]:
        """What the host reads back."""
        return [self.contrastive] if self.caption is None else [self.contrastive, self.caption]

    def on_host(self, contrastive: float, caption: float | None = None) -> tuple[float, CaptionerLosses]:
        """The loss from the host's values of `tensors`; and both of its terms by name, or {} if there is one."""
        if caption is None:
            return contrastive, {}
        value = contrastive + self.caption_weight * caption
        return value, {"contrastive_loss": contrastive, "caption_loss": caption}


class BatchPasses(Protocol):
    """A batch's two passes, and its loss: `TwoTowerPasses` or `CaptionerPasses`."""

    @property
    def cache(self) -> GradCache: ...

    @property
    def sorts_captions(self) -> bool:
        """Whether texts, or a captioner's pairs, are sorted by length; see `StepInputs`."""

    def encode(self, batch: HostBatch, before_chunk: Poll) -> EncodedBatch:
        """First pass. A collective if the ranks must agree on a count (see `StepInputs`).

        `before_chunk`: called before each chunk, as in `replay`.
        """

    def paired_features(self, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The features of images and of each image's first caption, (N, D) each. `features`: see `EncodedBatch`."""

    def start_agreement(self, upcoming: HostBatch | None, *, wants_save: bool) -> StepAgreement:
        """Begin the all-reduce of the next step's facts; see `StepInputs.start_agreement`. A collective."""

    def discard_agreement(self) -> None:
        """Discard the agreement on the next batch, because that batch or the one before it is discarded."""

    def replay(self, before_chunk: Poll) -> None:
        """Second pass, after the loss's backward pass: the gradients of the parameters."""

    def step_loss(self, contrastive: Tensor) -> StepLoss:
        """The loss of the step, after the replay. A collective. `contrastive`: the loss of the features."""


@dataclass
class TwoTowerPasses:
    """The passes of an image tower and a text tower: first all images, then all texts."""

    cache: GradCache
    inputs: StepInputs
    text_layout: TextLayout

    @property
    def sorts_captions(self) -> bool:
        return self.inputs.sorts_captions

    def encode(self, batch: HostBatch, before_chunk: Poll) -> EncodedBatch:
        image_features = self.cache.encode_tower(0, self.inputs.images(batch), before_chunk)
        texts = self.inputs.texts(batch, self.cache.chunks[1])
        return EncodedBatch([image_features, self.cache.encode_tower(1, texts, before_chunk)], texts)

    def paired_features(self, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        images, texts = features
        return images, texts[self.text_layout.first_captions(len(images))]

    def start_agreement(self, upcoming: HostBatch | None, *, wants_save: bool) -> StepAgreement:
        return self.inputs.start_agreement(upcoming, self.cache.chunks[1], wants_save=wants_save)

    def discard_agreement(self) -> None:
        self.inputs.agreement = None

    def replay(self, before_chunk: Poll) -> None:
        self.cache.replay(before_chunk)

    def step_loss(self, contrastive: Tensor) -> StepLoss:
        return StepLoss(contrastive)
