"""The batch that was published for about as many samples as a run has."""

import math
from pathlib import Path

from clipscale.common import files
from clipscale.common.units import format_count, format_decimal
from clipscale.config.train import TrainConfig

PUBLISHED = files.read_yaml(Path(__file__).with_name("batches.yaml"))
NEAR = 3
"""So many times more or fewer samples are about as many."""
FAR = 4
"""A batch of so many times the published one is warned of."""


def published_batch(config: TrainConfig) -> str:
    """One line, a warning where the run's batch is far larger.

    Empty for a run of unknown length, for one that begins with weights (those were trained from scratch), and where
    nothing was published.
    """
    if config.samples is None or config.model.weights:
        return ""
    distances = [abs(math.log(row["samples"] / config.samples)) for row in PUBLISHED]
    row = PUBLISHED[distances.index(min(distances))]
    known = f"{format_count(row['batch'])} at {format_decimal(row['samples'])} samples ({row['source']})"
    if config.batch > FAR * row["batch"]:
        return (
            f"warning: batch={format_count(config.batch)} is {config.batch / row['batch']:.0f} times what was "
            f"published for about as many samples, {known}; fewer steps may cost more than more negatives give "
            "(docs/loss.md)"
        )
    if min(distances) > math.log(NEAR):
        return ""
    return f"published for about as many samples: batch {known}"
