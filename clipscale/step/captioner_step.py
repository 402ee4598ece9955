"""A captioner's step: one encoder of pairs in the place of two towers, and a caption loss beside the contrast.

N: samples of this rank, in `FrozenImages` images of a chunk; D: feature width, P: tokens of an image, W: width of the
decoder.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clipscale.common.modules import is_frozen
from clipscale.common.poll import Poll
from clipscale.data.loader.host_batch import HostBatch
from clipscale.data.loader.to_device import ChunkLoader, Images
from clipscale.step.train_step import TrainStep


@dataclass
class CaptionerStep(TrainStep):
    """The cache's one encoder is a `PairEncoder`. The features are an image and its caption side by side, (N, 2, D).

    A step's loss is the contrastive loss of the features, plus `BatchLoss.caption_weight` times the mean cross entropy
    over the labels in the captions of the global batch.
    """

    # Bytes of a frozen image tower's output for one image, measured in an earlier step; 0 before.
    image_bytes: int = 0
    # Labels in the captions of this step's global batch; 0 before the first one is encoded.
    num_labels: int = 0

    def encode(self, batch: HostBatch, before_chunk: Poll) -> tuple[list[Tensor], ChunkLoader]:
        pairs, caption_loader = self.inputs.pairs(batch, self.cache.chunks[0])
        reserved = 0.0
        if is_frozen(self.model.image):
            reserved = min(self.cache.keep_bytes or 0, len(batch) * self.image_bytes)
            pairs.images = FrozenImages(pairs.images, self.model.image, self.precision.autocast, reserved)
        features = self.cache.encode_tower(0, pairs, before_chunk, reserved=reserved)
        if isinstance(pairs.images, FrozenImages):
            self.image_bytes = pairs.images.bytes_each
        self.num_labels = self.inputs.num_caption_labels(batch)
        return [features], caption_loader

    def images_and_texts(self, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        return features[0][:, 0], features[0][:, 1]

    @property
    def chunk_loss_weight(self) -> float:
        return self.batch_loss.caption_weight / self.num_labels

    def loss_terms(self, contrastive: Tensor) -> list[Tensor]:
        caption_loss_sum = self.cache.chunk_loss
        if caption_loss_sum is None:  # nothing was trained, so no chunk had a second pass
            return [contrastive]
        self.world.sum_(caption_loss_sum)
        return [contrastive, caption_loss_sum / self.num_labels]


class FrozenImages:
    """Gives a captioner the outputs of a frozen image tower in the place of pixels: features (N, D) and tokens
    (N, P, W).

    Each image is encoded once, as far as memory for its tokens allows: a chunk's first pass without a graph keeps them
    for its second pass, up to `most_bytes` in all. The other chunks are encoded again.
    """

    def __init__(
        self,
        images: Images,
        tower: nn.Module,
        autocast: Callable[[], AbstractContextManager[object]],
        most_bytes: float,
    ) -> None:
        """`autocast`: makes the context in which the tower runs."""
        self.images = images
        self.tower = tower
        self.autocast = autocast
        self.free_bytes = most_bytes
        # Bytes of the outputs of one image; 0 before the first chunk.
        self.bytes_each = 0
        # The outputs of chunks whose second pass is still to come.
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.images)

    def chunk(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        if (start, stop) in self.kept:
            return self.kept.pop((start, stop))
        with torch.no_grad(), self.autocast():
            outputs: tuple[Tensor, Tensor] = self.tower(self.images.chunk(start, stop), with_tokens=True)
        size = sum(rows.nbytes for rows in outputs)
        self.bytes_each = size // (stop - start)
        if not torch.is_grad_enabled() and size <= self.free_bytes:
            self.kept[start, stop] = outputs
            self.free_bytes -= size
        return outputs
