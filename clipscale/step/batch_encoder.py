"""Encodes a step's batch: by two towers, or by a captioner as one encoder of pairs.

N: samples of this rank, D: feature width.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypedDict

from torch import Tensor

from clipscale.common.modules import is_frozen
from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.loader.to_device import ChunkLoader
from clipscale.distributed.world import World
from clipscale.models.towers import Tower
from clipscale.step.cache.grad_cache import GradCache
from clipscale.step.frozen_images import FrozenImages
from clipscale.step.step_inputs import StepInputs


class LossTerms(TypedDict, total=False):
    """A captioner's two losses, unweighted. The keys are their names in metrics.jsonl."""

    contrastive_loss: float
    caption_loss: float


class BatchEncoder(Protocol):
    """The encoders of a step, in its gradient cache, and their inputs. `build_step` chooses the kind."""

    # Its loss is a BatchLoss, called with the features that `encode` returns.
    cache: GradCache
    inputs: StepInputs

    @property
    def chunk_loss_weight(self) -> float:
        """The weight of the chunks' own losses in the gradients of this batch."""

    def encode(self, batch: HostBatch, before_chunk: Callable[[], None]) -> tuple[list[Tensor], ChunkLoader]:
        """First pass. Returns the features, for the cache's loss, and the caption chunks.

        A collective if the ranks must agree on a count (`StepInputs`). `before_chunk`: called before each chunk.
        """

    def images_and_texts(self, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The features of images and of captions, (N, D) each, given what `encode` returned."""

    def losses(self, contrastive: Tensor) -> list[Tensor]:
        """The losses of the global batch, unweighted, 0-d. Call it after the replay. A collective."""

    def total(self, losses: list[float]) -> tuple[float, LossTerms]:
        """The step's loss from the values of `losses`, and its terms by name if it has several."""


@dataclass
class TowerBatchEncoder:
    """The two towers, one after the other. The features are images and captions, (N, D) each."""

    cache: GradCache
    inputs: StepInputs

    @property
    def chunk_loss_weight(self) -> float:
        return 0.0  # the towers' chunks have no loss of their own

    def encode(self, batch: HostBatch, before_chunk: Callable[[], None]) -> tuple[list[Tensor], ChunkLoader]:
        image_features = self.cache.encode_tower(0, self.inputs.images(batch), before_chunk)
        caption_loader = self.inputs.captions(batch, self.cache.chunks[1])
        return [image_features, self.cache.encode_tower(1, caption_loader, before_chunk)], caption_loader

    def images_and_texts(self, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        images, texts = features
        return images, texts

    def losses(self, contrastive: Tensor) -> list[Tensor]:
        return [contrastive]

    def total(self, losses: list[float]) -> tuple[float, LossTerms]:
        return losses[0], {}


@dataclass
class PairBatchEncoder:
    """A captioner as one encoder of pairs. The features are an image and its caption side by side, (N, 2, D).

    A step's loss is the contrastive loss of the features, plus `caption_weight` times the mean cross entropy over the
    tokens of the global batch.
    """

    cache: GradCache
    inputs: StepInputs
    world: World
    image: Tower
    # Makes the context in which a frozen image tower runs.
    autocast: Callable[[], AbstractContextManager[object]]
    caption_weight: float
    # Bytes of a frozen image tower's output for one image, measured in an earlier step; 0 before.
    image_bytes: int = 0
    # Labels in the captions of this step's global batch.
    num_labels: int = 1

    @property
    def chunk_loss_weight(self) -> float:
        return self.caption_weight / self.num_labels

    def encode(self, batch: HostBatch, before_chunk: Callable[[], None]) -> tuple[list[Tensor], ChunkLoader]:
        pairs, caption_loader = self.inputs.pairs(batch, self.cache.chunks[0])
        reserved = 0.0
        if is_frozen(self.image):
            reserved = min(self.cache.keep_budget.bytes, len(batch) * self.image_bytes)
            pairs.images = FrozenImages(pairs.images, self.image, self.autocast, reserved)
        features = self.cache.encode_tower(0, pairs, before_chunk, reserved=reserved)
        if isinstance(pairs.images, FrozenImages):
            self.image_bytes = pairs.images.bytes_each
        self.num_labels = self.inputs.num_caption_labels(batch)
        return [features], caption_loader

    def images_and_texts(self, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        return features[0][:, 0], features[0][:, 1]

    def losses(self, contrastive: Tensor) -> list[Tensor]:
        caption_loss_sum = self.cache.chunk_loss
        if caption_loss_sum is None:  # nothing was trained, so no chunk had a second pass
            return [contrastive]
        self.world.sum_(caption_loss_sum)
        return [contrastive, caption_loss_sum / self.num_labels]

    def total(self, losses: list[float]) -> tuple[float, LossTerms]:
        if len(losses) == 1:
            return losses[0], {}
        contrastive_loss, caption_loss = losses
        total = contrastive_loss + self.caption_weight * caption_loss
        return total, {"contrastive_loss": contrastive_loss, "caption_loss": caption_loss}
