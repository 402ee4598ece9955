"""The loss of a run's batch: its objective, and that of its teachers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from clipscale.common.record import Record
from clipscale.config.train import TrainConfig
from clipscale.data.columns import KEYS
from clipscale.data.features import TeacherFeatures
from clipscale.loss.api import contrastive_loss, distillation_loss
from clipscale.loss.machine import Machine
from clipscale.loss.objective import OBJECTIVES
from clipscale.models.towers import ClipModel, unit_rows


@dataclass(frozen=True)
class BatchLoss:
    """The global mean of the loss, on every rank. Gradients are shares: their sum over ranks is its gradient."""

    config: TrainConfig
    model: ClipModel
    """Its logit scale and bias."""
    autocast: Callable[[], Any]
    teachers: Sequence[TeacherFeatures] = ()
    """Read the features of `distill.teachers`."""
    machine: Machine | None = None
    """What the loss runs on; None: this machine."""
    group: dist.ProcessGroup | None = None
    """The ranks whose samples meet in the loss; None: all."""

    def __call__(
        self, image_features: Tensor, text_features: Tensor, *, targets: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Tensor:
        """`targets`: the columns that it takes (data/columns.py), by their names."""
        config = self.config.loss
        options: Record = {
            "logit_bias": self.model.logit_bias if OBJECTIVES[config.objective].needs_bias else None,
            "captions": self.config.data.captions_per_step,
            "keys": targets.get(KEYS),
            "group": self.group,
            "machine": self.machine,
            "check": False,
            **vars(config),
        }
        scale = self.model.logit_scale.exp()
        with self.autocast():
            if not self.teachers:
                return contrastive_loss(image_features, text_features, scale, **options)
            teachers = []
            for teacher in self.teachers:
                rows = unit_rows(targets[teacher.member])
                teachers.append((rows[:, 0], rows[:, 1], teacher.scale))
            weights = self.config.distill.weights
            return distillation_loss(image_features, text_features, scale, teachers, weights, **options)
