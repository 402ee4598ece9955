"""Writes checkpoints without a run."""

from pathlib import Path
from typing import Any

import torch

from clipscale import checkpoint
from clipscale.config.sections import CheckpointConfig
from clipscale.distributed.world import World

ALONE = World(0, 1, torch.device("cpu"))
"""A run of one process."""


def save(run: Path, step: int, state: dict[str, Any], *, keep: int, keep_every: int = 0) -> Path:
    """Write a checkpoint in one process and wait for it; see `checkpoint.Saver`. Returns its folder."""
    config = CheckpointConfig(keep=keep, keep_every=keep_every)
    checkpoint.Saver(run, ALONE, config).save(step, state, last=True)
    return checkpoint.path_of(run, step)
