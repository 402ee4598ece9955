"""The loss of a run's batch."""

from dataclasses import dataclass

from torch import Tensor

from clipscale.common.record import Record
from clipscale.config.train import TrainConfig
from clipscale.loss.api import contrastive_loss
from clipscale.loss.machine import Machine
from clipscale.loss.objective import OBJECTIVES
from clipscale.models.towers import ClipModel, unit_rows
from clipscale.step.precision import Precision

# A part of a unit row that is shorter is divided by this: its gradient is at most 1,000 times as long.
SHORTEST = 1e-3


@dataclass(frozen=True)
class BatchLoss:
    """The global mean of the loss, on every rank. Each rank's gradient is a share: the shares sum to the gradient.

    With `loss.sizes` (Matryoshka, Kusupati et al. 2022, arXiv 2205.13147, equation 1) it is a sum of losses: one of the
    whole features, and for each size one of their first `size` numbers, normalised to unit length. Where
    these are shorter than SHORTEST, they are divided by that.
    """

    config: TrainConfig
    # Has the logit scale and bias.
    model: ClipModel
    precision: Precision
    # Where the loss runs; None: this machine.
    machine: Machine | None = None
    # Whether sample weights may put a sample into a batch twice. The copies are no negatives of each other.
    repeats: bool = False

    def __call__(self, image_features: Tensor, text_features: Tensor, *, keys: Tensor | None = None) -> Tensor:
        """`keys`: (N,) int64; samples with equal keys are no negatives of each other."""
        config = self.config.loss
        options: Record = {
            "logit_bias": self.model.logit_bias if OBJECTIVES[config.objective].needs_bias else None,
            "keys": keys if self.config.data.same or self.repeats else None,
            "machine": self.machine,
            "check": False,
            **vars(config),
        }
        del options["sizes"]
        scale = self.model.logit_scale.exp()
        with self.precision.autocast():
            value = contrastive_loss(image_features, text_features, scale, **options)
            for size in config.sizes:
                shorter = [unit_rows(rows[:, :size], SHORTEST) for rows in (image_features, text_features)]
                value = value + contrastive_loss(*shorter, scale, **options)
            return value
