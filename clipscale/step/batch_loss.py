"""The loss of a run's batch."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from clipscale.loss.api import contrastive_loss
from clipscale.loss.machine import Machine
from clipscale.loss.objective import OBJECTIVES
from clipscale.models.towers import ClipModel, unit_rows

# A part of a unit row that is shorter is divided by this: its gradient is at most 1,000 times as long.
SHORTEST = 1e-3


@dataclass(frozen=True)
class BatchLoss:
    """The global mean of the loss, on every rank. Each rank's gradient is a share: the shares sum to the gradient.

    With `sizes` (Matryoshka, Kusupati et al. 2022, arXiv 2205.13147, equation 1) it is a sum of losses: one of the
    whole features, and for each size one of their first `size` numbers, normalised to unit length. Where
    these are shorter than SHORTEST, they are divided by that.
    """

    # Has the logit scale and bias.
    model: ClipModel
    # Makes the context in which the loss runs.
    autocast: Callable[[], AbstractContextManager[object]]
    # The next three are arguments of `contrastive_loss`.
    objective: str = "softmax"
    exchange: str = "auto"
    backend: str = "auto"
    sizes: tuple[int, ...] = ()
    # Texts of each image that are its positives; texts beyond them are hard negatives.
    captions: int = 1
    # Whether samples with equal keys are no negatives of each other.
    uses_keys: bool = False
    # Where the loss runs; None: this machine.
    machine: Machine | None = None

    def __call__(self, image_features: Tensor, text_features: Tensor, *, keys: Tensor | None = None) -> Tensor:
        """`keys`: (N,) int64; see `uses_keys`."""

        def loss(images: Tensor, texts: Tensor) -> Tensor:
            return contrastive_loss(
                images,
                texts,
                scale,
                logit_bias=self.model.logit_bias if OBJECTIVES[self.objective].needs_bias else None,
                objective=self.objective,
                exchange=self.exchange,
                backend=self.backend,
                keys=keys if self.uses_keys else None,
                captions=self.captions,
                machine=self.machine,
                check=False,
            )

        scale = self.model.logit_scale.exp()
        with self.autocast():
            value = loss(image_features, text_features)
            for size in self.sizes:
                shorter = [unit_rows(rows[:, :size], SHORTEST) for rows in (image_features, text_features)]
                value = value + loss(*shorter)
            return value
