"""Trains as `clipscale train` does, but with negatives from each chunk alone, as plain gradient accumulation has them.

python benchmarks/accumulation.py experiment=demo samples=16k data.workers=0 batch=128 cache.chunk=16 run=accumulated

For docs/step.md, "Why not accumulate". One process.
"""

import sys

from torch import Tensor

from clipscale.cli import compose
from clipscale.config.train import check
from clipscale.step.batch_loss import BatchLoss
from clipscale.train import train

loss_of_batch = BatchLoss.__call__


def loss_of_chunks(loss: BatchLoss, image_features: Tensor, text_features: Tensor, *, keys: Tensor) -> Tensor:
    """The mean over chunks of the loss of each image chunk with its own captions."""
    size = loss.config.cache.sizes[0]
    assert size, "give cache.chunk=N"
    value = image_features.new_zeros(())
    for start in range(0, len(image_features), size):
        images, texts = image_features[start : start + size], text_features[start : start + size]
        share = len(images) / len(image_features)
        value = value + share * loss_of_batch(loss, images, texts, keys=keys[start : start + size])
    return value


if __name__ == "__main__":
    BatchLoss.__call__ = loss_of_chunks  # type: ignore[assignment,method-assign]
    config = compose.settings("train", compose.overrides("train", sys.argv[1:])[1])
    check(config)
    train(config)
