"""The content of a checkpoint, and its form in the files."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, TypedDict

from torch import Tensor

from clipscale import __version__
from clipscale.common.batch import ChunkSizes
from clipscale.common.rng import RandomState
from clipscale.data.loader.position import DataPosition


class OptimizerState(TypedDict, total=False):
    """An optimizer's state and settings. Names stand for the parameters."""

    # Parameter -> its tensors by name.
    state: dict[str, dict[str, Tensor]]
    # `params`, and the settings of the group.
    param_groups: list[dict[str, Any]]


class EmaState(TypedDict):
    """The moving average of the weights."""

    updates: int
    weights: dict[str, Tensor]


@dataclass
class CheckpointDescription:
    """What a checkpoint says of its run: everything in it but the states of model, optimizer, average and loss scale.

    Fields that an earlier version did not write keep their defaults; `version` is then empty.
    """

    # Steps that have been trained.
    step: int = 0
    # Samples that have been trained on.
    samples: int = 0
    # Samples of a step.
    batch: int = 0
    # The last step's loss.
    loss: float = math.nan
    # The settings of the model.
    model_config: dict[str, object] = field(default_factory=dict)
    # The setting optim.name.
    optimizer_name: str = ""
    # The samples per chunk; None if not known.
    chunks: ChunkSizes | None = None
    # The random states of each rank.
    random: list[RandomState] = field(default_factory=list)
    # Where each shard stream stands in the data; None if not known.
    position: DataPosition | None = None
    # The clipscale version that wrote it; empty if not known.
    version: str = __version__

    @classmethod
    def from_state_dict(cls, tree: Mapping[str, Any]) -> Self:
        """What the tree in a checkpoint's files has of this class. Fields of other versions are left out."""
        field_names = {own.name for own in fields(cls)}
        values = {"version": "", **{name: value for name, value in tree.items() if name in field_names}}
        chunks = values.get("chunks")
        position = values.get("position")
        return cls(
            **values
            | {
                "chunks": ChunkSizes(**chunks) if chunks else None,
                "random": [RandomState.from_state_dict(record) for record in values.get("random", ())],
                "position": DataPosition.from_state_dict(position) if position else None,
            }
        )


@dataclass
class CheckpointState(CheckpointDescription):
    """The whole content of a checkpoint, which `gather_checkpoint_state` makes."""

    # Weights by name.
    model: dict[str, Tensor] = field(default_factory=dict)
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    # The loss scale of fp16.
    scaler: dict[str, object] | None = None
    ema: EmaState | None = None

    def state_dict(self) -> dict[str, object]:
        """The content as dictionaries of plain values and tensors, which a checkpoint's files hold."""
        return {
            "step": self.step,
            "samples": self.samples,
            "batch": self.batch,
            "loss": self.loss,
            "model": self.model,
            "model_config": self.model_config,
            "optimizer": self.optimizer,
            "optimizer_name": self.optimizer_name,
            "scaler": self.scaler,
            "ema": self.ema,
            "chunks": asdict(self.chunks) if self.chunks else {},
            "random": [state.state_dict() for state in self.random],
            "position": self.position.state_dict() if self.position else {},
            "version": self.version,
        }
