"""The two passes of a batch through the model: the interface that a step calls, and its implementation for two towers.

A captioner has one encoder of pairs in the place of two towers; see `captioner_passes.py`.
N: samples of this rank, D: feature width.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypedDict

from torch import Tensor

from clipscale.batch.text_layout import TextLayout
from clipscale.common.poll import Poll
from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.step.cache.grad_cache import GradCache
from clipscale.step.step_inputs import StepAgreement, StepInputs


class EncodedBatch(NamedTuple):
    """The result of a batch's first pass."""

    # The arguments of the cache's loss: images (N, D) and texts, or a captioner's pairs (N, 2, D).
    features: list[Tensor]
    # The text tower's input. If the captions are sorted, it has the width of each chunk.
    captions: ChunkLoader


class CaptionerLosses(TypedDict, total=False):
    """A captioner's two losses, unweighted. The keys are their names in metrics.jsonl."""

    contrastive_loss: float
    caption_loss: float


class BatchPasses(Protocol):
    """A batch's two passes, and the terms of its loss: `TwoTowerPasses` or `CaptionerPasses`."""

    @property
    def cache(self) -> GradCache: ...

    @property
    def inputs(self) -> StepInputs: ...

    def encode(self, batch: HostBatch, before_chunk: Poll) -> EncodedBatch:
        """First pass. A collective if the ranks must agree on a count (see `StepInputs`).

        `before_chunk`: called before each chunk, as in `replay`.
        """

    def first_pairs(self, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The features of images and of each image's first caption, (N, D) each. `features`: see `EncodedBatch`."""

    def begin_agreement(self, upcoming: HostBatch | None, *, wants_save: bool) -> StepAgreement:
        """Begin the all-reduce of the next step's facts; see `StepInputs.begin_agreement`. A collective."""

    def replay(self, before_chunk: Poll) -> None:
        """Second pass, after the loss's backward pass: the gradients of the parameters."""

    def loss_terms(self, contrastive: Tensor) -> list[Tensor]:
        """The terms of the global batch's loss, 0-d. A collective.

        `contrastive`: the loss of the features. Call it after the replay.
        """

    def combine_loss_terms(self, *terms: float) -> tuple[float, CaptionerLosses]:
        """The step's loss from the host values of `loss_terms`; and the two terms by name, or {} if there is one."""


@dataclass
class TwoTowerPasses:
    """The passes of an image tower and a text tower: first all images, then all texts."""

    cache: GradCache
    inputs: StepInputs
    text_layout: TextLayout

    def encode(self, batch: HostBatch, before_chunk: Poll) -> EncodedBatch:
        image_features = self.cache.encode_tower(0, self.inputs.images(batch), before_chunk)
        captions = self.inputs.captions(batch, self.cache.chunks[1])
        return EncodedBatch([image_features, self.cache.encode_tower(1, captions, before_chunk)], captions)

    def first_pairs(self, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        images, texts = features
        return images, texts[self.text_layout.first_captions(len(images))]

    def begin_agreement(self, upcoming: HostBatch | None, *, wants_save: bool) -> StepAgreement:
        return self.inputs.begin_agreement(upcoming, self.cache.chunks[1], wants_save=wants_save)

    def replay(self, before_chunk: Poll) -> None:
        self.cache.replay(before_chunk)

    def loss_terms(self, contrastive: Tensor) -> list[Tensor]:
        return [contrastive]

    def combine_loss_terms(self, *terms: float) -> tuple[float, CaptionerLosses]:
        [contrastive] = terms
        return contrastive, {}
