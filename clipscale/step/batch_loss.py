"""The loss of a run's batch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clipscale.loss.api import contrastive_loss, distillation_loss
from clipscale.loss.distillation import Teacher
from clipscale.loss.machine import Machine
from clipscale.loss.objective import OBJECTIVES
from clipscale.models.towers import ClipModel, unit_rows

# Least length by which the first numbers of a feature are divided. Their gradient grows at most 1,000 times.
MIN_LENGTH = 1e-3


@dataclass(frozen=True)
class BatchLoss:
    """The global mean of the loss, on every rank. Each rank's gradient is a share: the shares sum to the gradient.

    With `sizes` (Matryoshka, Kusupati et al. 2022, arXiv 2205.13147, equation 1) it is a sum of losses: one of the
    whole features, and for each size one of their first `size` numbers, normalised to unit length. Numbers of a length
    below MIN_LENGTH are divided by MIN_LENGTH.
    """

    # The model, which has the logit scale and bias.
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
    # The logit scale of each teacher. Without teachers the loss is the pairs' alone.
    teacher_scales: tuple[float, ...] = ()
    # The weight of the pairs' loss, and of the distillation.
    distill_weights: tuple[float, float] = (0.0, 1.0)

    def __call__(
        self,
        image_features: Tensor,
        text_features: Tensor,
        *,
        keys: Tensor | None = None,
        teachers: Sequence[Tensor] = (),
    ) -> Tensor:
        """`keys`: (N,) int64; see `uses_keys`. `teachers`: each one's features of pictures and captions, (N, 2, D)."""
        used = keys if self.uses_keys else None
        taught = [
            (features[:, 0], features[:, 1], scale)
            for features, scale in zip(teachers, self.teacher_scales, strict=True)
        ]
        with self.autocast():
            value = self._value(image_features, text_features, used, taught)
            for size in self.sizes:
                images, texts = (unit_rows(rows[:, :size], MIN_LENGTH) for rows in (image_features, text_features))
                value = value + self._value(images, texts, used, taught)
            return value

    def of_pairs(self, features: Tensor, **targets: Any) -> Tensor:
        """The loss of features of images and captions side by side, (N, 2, D). `targets`: as above."""
        images, texts = features.unbind(1)
        return self(images.contiguous(), texts.contiguous(), **targets)

    def _value(self, images: Tensor, texts: Tensor, keys: Tensor | None, teachers: Sequence[Teacher]) -> Tensor:
        """The loss of the pairs, of the teachers, or of both."""
        if not teachers:
            return self._of_pairs(images, texts, keys)
        of_pairs, of_teachers = self.distill_weights
        is_one = self.objective == "softmax"  # then both are one softmax
        value = self.model.logit_scale.new_zeros(())
        if of_pairs and not is_one:
            value = of_pairs * self._of_pairs(images, texts, keys)
        return value + distillation_loss(
            images,
            texts,
            self.model.logit_scale.exp(),
            teachers,
            (of_pairs if is_one else 0.0, of_teachers),
            exchange=self.exchange,
            backend="auto" if self.backend == "triton" else self.backend,
            keys=keys,
            machine=self.machine,
            check=False,
        )

    def _of_pairs(self, images: Tensor, texts: Tensor, keys: Tensor | None) -> Tensor:
        return contrastive_loss(
            images,
            texts,
            self.model.logit_scale.exp(),
            logit_bias=self.model.logit_bias if OBJECTIVES[self.objective].needs_bias else None,
            objective=self.objective,
            exchange=self.exchange,
            backend=self.backend,
            keys=keys,
            captions=self.captions,
            machine=self.machine,
            check=False,
        )
