"""The two passes over a batch: encode and replay.

A captioner has one encoder of pairs in the place of two towers; see `captioner_passes.py`.
N: samples of this rank, D: feature width.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from clipscale.common.batch import TextLayout
from clipscale.common.signals import Poll
from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.loader.to_device import TextLoader
from clipscale.step.cache.grad_cache import GradCache
from clipscale.step.step_loss import StepLoss
from clipscale.step.tower_inputs import NextStepSync, TowerInputs


class EncodedBatch(NamedTuple):
    """The result of a batch's first pass."""

    # The arguments of the cache's loss: images (N, D) and texts, or a captioner's pairs (N, 2, D).
    features: list[Tensor]
    # The text tower's input, which knows the padded length of each chunk.
    texts: TextLoader


@dataclass
class BatchPasses(ABC):
    """A batch's two passes, and its loss: `TwoTowerPasses` or `CaptionerPasses`."""

    cache: GradCache
    inputs: TowerInputs

    @property
    def sorts_captions(self) -> bool:
        """Whether texts, or a captioner's pairs, are sorted by length; see `TowerInputs`."""
        return self.inputs.sorts_captions

    @abstractmethod
    def encode(self, batch: HostBatch, before_chunk: Poll) -> EncodedBatch:
        """First pass. A collective if a number of all ranks is not known yet (see `TowerInputs`).

        `before_chunk`: called before each chunk, as in `replay`.
        """

    @abstractmethod
    def paired_features(self, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The features of images and of each image's first caption, (N, D) each. `features`: see `EncodedBatch`."""

    @abstractmethod
    def start_next_step_sync(self, upcoming: HostBatch | None, *, wants_save: bool) -> NextStepSync:
        """Send the ranks' message about the next step; see `TowerInputs.start_next_step_sync`. A collective."""

    def discard_next_step_sync(self) -> None:
        """Discard the message about the next batch, because that batch or the one before it is discarded."""
        self.inputs.discard_next_step_sync()

    @abstractmethod
    def replay(self, before_chunk: Poll) -> None:
        """Second pass, after the loss's backward pass: the gradients of the parameters."""

    @abstractmethod
    def step_loss(self, contrastive: Tensor) -> StepLoss:
        """The loss of the step, after the replay. A collective. `contrastive`: the loss of the features."""


@dataclass
class TwoTowerPasses(BatchPasses):
    """The passes of an image tower and a text tower: first all images, then all texts."""

    text_layout: TextLayout

    def encode(self, batch: HostBatch, before_chunk: Poll) -> EncodedBatch:
        image_features = self.cache.encode_tower(0, self.inputs.images(batch), before_chunk)
        texts = self.inputs.texts(batch, self.cache.chunks[1])
        return EncodedBatch([image_features, self.cache.encode_tower(1, texts, before_chunk)], texts)

    def paired_features(self, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        images, texts = features
        return images, texts[self.text_layout.first_captions(len(images))]

    def start_next_step_sync(self, upcoming: HostBatch | None, *, wants_save: bool) -> NextStepSync:
        return self.inputs.start_next_step_sync(upcoming, self.cache.chunks[1], wants_save=wants_save)

    def replay(self, before_chunk: Poll) -> None:
        self.cache.replay(before_chunk)

    def step_loss(self, contrastive: Tensor) -> StepLoss:
        return StepLoss(contrastive)
