"""The loss of a step on the device, and the step's scalars on the host."""

import math
from dataclasses import dataclass
from typing import TypedDict

from torch import Tensor

from clipscale.step.measurements import Readback


class CaptionerLosses(TypedDict, total=False):
    """A captioner's two losses, unweighted. The keys are their names in metrics.jsonl."""

    contrastive_loss: float
    caption_loss: float


@dataclass(frozen=True)
class StepLoss:
    """The loss of the global batch, on the device, and how its terms add up."""

    # 0-d, the loss of the features.
    contrastive: Tensor
    # 0-d, a captioner's mean cross entropy; None if there is none.
    caption: Tensor | None = None
    caption_weight: float = 0.0

    @property
    def tensors(self) -> list[Tensor]:
        """The terms, which the host reads back."""
        return [self.contrastive] if self.caption is None else [self.contrastive, self.caption]

    def total_and_terms(self, contrastive: float, caption: float | None = None) -> tuple[float, CaptionerLosses]:
        """The loss, and both of its terms by name; {} if it has only one term.

        `contrastive`, `caption`: the values of `tensors`.
        """
        if caption is None:
            return contrastive, {}
        value = contrastive + self.caption_weight * caption
        return value, {"contrastive_loss": contrastive, "caption_loss": caption}


@dataclass(frozen=True)
class StepScalars:
    """The scalars of a step that the host reads back, to decide whether the weights are updated."""

    loss: float
    # Empty if the loss has only one term.
    captioner_losses: CaptionerLosses
    # The norm of all parameters' gradients, before clipping.
    grad_norm: float

    @staticmethod
    def read(loss: StepLoss, norm: Tensor) -> "StepScalars":
        """The step's loss and gradient norm, on the host. Waits for the device."""
        grad_norm, *terms = Readback.start_scalars(norm, *loss.tensors).read()
        value, captioner_losses = loss.total_and_terms(*terms)
        return StepScalars(value, captioner_losses, grad_norm)

    @property
    def is_finite(self) -> bool:
        """Whether loss and norm are finite. If they are not, the run ends before the update. fp16 uses
        `overflows` instead.
        """
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def overflows(self) -> bool:
        """Whether the gradients are not finite. With fp16 the loss scaler then skips the update, whatever the loss."""
        return not math.isfinite(self.grad_norm)
