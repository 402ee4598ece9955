"""Trains as `clipscale train` does, but with negatives from each chunk alone, as plain gradient accumulation has them.

python benchmarks/accumulation.py experiment=demo samples=16k data.workers=0 batch=128 cache.chunk=16 run=accumulated

For docs/step.md, "Why not accumulate". One process.
"""

import sys
from collections.abc import Sequence

from torch import Tensor

from clipscale.cli.compose import compose_settings
from clipscale.cli.words import overrides_of
from clipscale.config.checks import check_across_sections
from clipscale.step.batch_loss import BatchLoss
from clipscale.train import train

loss_of_batch = BatchLoss.__call__
CONFIG = compose_settings("train", overrides_of("train", sys.argv[1:])[1])
CHUNK = CONFIG.cache.sizes[0]


def loss_of_chunks(
    loss: BatchLoss,
    image_features: Tensor,
    text_features: Tensor,
    *,
    sameness_keys: Tensor,
    teacher_features: Sequence[Tensor],
) -> Tensor:
    """The mean over chunks of the loss of each image chunk with its own captions."""
    assert CHUNK, "give cache.chunk=N"
    value = image_features.new_zeros(())
    for start in range(0, len(image_features), CHUNK):
        chunk = slice(start, start + CHUNK)
        images = image_features[chunk]
        share = len(images) / len(image_features)
        value = value + share * loss_of_batch(
            loss,
            images,
            text_features[chunk],
            sameness_keys=sameness_keys[chunk],
            teacher_features=[rows[chunk] for rows in teacher_features],
        )
    return value


if __name__ == "__main__":
    BatchLoss.__call__ = loss_of_chunks  # type: ignore[assignment,method-assign]
    check_across_sections(CONFIG)
    train(CONFIG)
