"""A captioner's passes: one encoder of pairs in the place of two towers, and a caption loss beside the contrastive one.

N: samples of this rank (in `FrozenTowerOutputs`: images of one chunk); D: feature width; P: tokens of an image;
W: width of the decoder.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipscale.common.signals import Poll
from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.loader.to_device import Images
from clipscale.models.captioner import count_caption_labels
from clipscale.step.batch_passes import BatchPasses, EncodedBatch
from clipscale.step.step_loss import StepLoss
from clipscale.step.tower_inputs import NextStepSync


@dataclass
class CaptionerPasses(BatchPasses):
    """The passes of a `PairEncoder`. The features are an image and its caption side by side, (N, 2, D).

    A step's loss is the contrastive loss of the features, plus `caption_weight` times the mean cross entropy. The mean
    is over the labels in all captions of the global batch. A chunk computes its cross entropies in its pass with a
    graph: the second pass, or the first pass if its graph is kept.
    """

    caption_weight: float
    # The frozen image tower; None if it trains. Its outputs are kept between the passes as far as memory allows.
    frozen_images: nn.Module | None
    # Makes the context in which the frozen tower runs.
    autocast: Callable[[], AbstractContextManager[object]]
    # Bytes of the frozen tower's output for one image, measured in an earlier step; 0 before.
    image_bytes: int = 0
    # Labels in the captions of this step's global batch; 0 before the first one is encoded.
    num_labels: int = 0

    def encode(self, batch: HostBatch, before_chunk: Poll) -> EncodedBatch:
        pairs = self.inputs.texts(batch, self.cache.chunks[0]).with_images(batch.pixels)
        if self.frozen_images is None:
            features = self.cache.encode_tower(0, pairs, before_chunk)
        else:
            reserved_bytes = min(self.cache.graph_budget.max_bytes, len(batch) * self.image_bytes)
            outputs = FrozenTowerOutputs(pairs.images, self.frozen_images, self.autocast, reserved_bytes)
            pairs.images = outputs
            features = self.cache.encode_tower(0, pairs, before_chunk, reserved_bytes=reserved_bytes)
            self.image_bytes = outputs.bytes_per_image
        # At least 1, because it divides. It is 0 only after a failure of the loader, which ends the step.
        self.num_labels = max(1, self.inputs.num_caption_labels(local_caption_labels(batch)))
        return EncodedBatch([features], pairs.texts)

    def paired_features(self, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        [pairs] = features
        return pairs[:, 0], pairs[:, 1]

    def start_next_step_sync(self, upcoming: HostBatch | None, *, wants_save: bool) -> NextStepSync:
        labels = local_caption_labels(upcoming) if upcoming else 0
        return self.inputs.start_next_step_sync(
            upcoming, self.cache.chunks[0], wants_save=wants_save, caption_labels=labels
        )

    def replay(self, before_chunk: Poll) -> None:
        self.cache.replay(before_chunk, chunk_loss_weight=self.caption_weight / self.num_labels)

    def step_loss(self, contrastive: Tensor) -> StepLoss:
        if self.cache.chunk_loss is None:  # no chunk had a second pass, because nothing trains
            return StepLoss(contrastive)
        caption_loss_sum = self.cache.chunk_loss.clone()  # the sum over ranks is in place
        self.inputs.world.all_reduce_sum_(caption_loss_sum)
        return StepLoss(contrastive, caption_loss_sum / self.num_labels, self.caption_weight)


def local_caption_labels(batch: HostBatch) -> int:
    """The labels in this rank's captions. Waits for all samples."""
    return int(count_caption_labels(batch.tokens(0, batch.num_texts)))


class FrozenTowerOutputs:
    """A captioner's images as the outputs of a frozen image tower: features (N, D) and tokens (N, P, W).

    The first pass keeps a chunk's outputs for the second pass, up to `max_kept_bytes` in all. The second pass encodes
    the images of the other chunks again.
    """

    def __init__(
        self,
        images: Images,
        tower: nn.Module,
        autocast: Callable[[], AbstractContextManager[object]],
        max_kept_bytes: float,
    ) -> None:
        """`autocast`: makes the context in which the tower runs."""
        self.images = images
        self.tower = tower
        self.autocast = autocast
        self.kept_bytes_left = max_kept_bytes
        # Bytes of the outputs of one image; 0 before the first chunk.
        self.bytes_per_image = 0
        # The outputs of chunks whose second pass is still to come.
        self.kept_outputs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.images)

    def chunk(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        if (start, stop) in self.kept_outputs:
            return self.kept_outputs.pop((start, stop))
        with torch.no_grad(), self.autocast():
            outputs: tuple[Tensor, Tensor] = self.tower(self.images.chunk(start, stop), with_tokens=True)
        size = sum(rows.nbytes for rows in outputs)
        self.bytes_per_image = size // (stop - start)
        if not torch.is_grad_enabled() and size <= self.kept_bytes_left:
            self.kept_outputs[start, stop] = outputs
            self.kept_bytes_left -= size
        return outputs
