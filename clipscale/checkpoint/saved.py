"""What a checkpoint holds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from clipscale import __version__
from clipscale.common.record import Record


@dataclass
class Saved:
    """The content of a checkpoint: trees of plain values and tensors. Fields that an earlier version did not write keep
    their defaults.

    `Run.save` makes it, with `saved_state` of the step; everything that reads a checkpoint reads these fields.
    """

    # Steps that have been trained.
    step: int = 0
    # Samples that have been trained on.
    samples: int = 0
    # Samples of a step.
    batch: int = 0
    # The last step's loss.
    loss: float = math.nan
    # Weights by name.
    model: Record = field(default_factory=dict)
    # The settings of the model.
    model_config: Record = field(default_factory=dict)
    # Its `state` and its `param_groups`, by the parameters' names.
    optimizer: Record = field(default_factory=dict)
    # The setting optim.name.
    optimizer_name: str = ""
    # The loss scale of fp16.
    scaler: Record | None = None
    # The moving average: its `weights` and the number of `updates`.
    ema: Record | None = None
    # Samples per chunk by tower, and the device that they are for.
    chunks: Record = field(default_factory=dict)
    # The random states of each rank.
    random: list[Record] = field(default_factory=list)
    # Where each shard stream stands in the data.
    position: Record = field(default_factory=dict)
    # The clipscale version that wrote it; empty: unknown.
    version: str = __version__

    @staticmethod
    def of(values: Mapping[str, Any]) -> "Saved":
        """Made from the tree in a checkpoint's files. Fields that only another version has are left out."""
        known = {each.name for each in fields(Saved)}
        return Saved(**{"version": "", **{name: value for name, value in values.items() if name in known}})
