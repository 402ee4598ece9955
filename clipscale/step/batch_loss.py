"""The loss of a batch's features: contrastive loss and distillation."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypedDict

from torch import Tensor

from clipscale.loss.api import contrastive_loss, distillation_loss
from clipscale.loss.distillation.distillation_objective import Teacher
from clipscale.loss.objective import OBJECTIVES
from clipscale.models.towers import ClipModel, l2_normalize

# Truncated features (`feature_sizes`) are divided by their length, but by no less than this: their gradient grows by a
# factor of at most 1,000.
MIN_LENGTH = 1e-3


class LossOptions(TypedDict):
    """The keyword arguments of a call of `BatchLoss`."""

    # (N,) int64, equal for samples that are the same.
    sameness_keys: Tensor
    # One tensor (N, 2, D) for each teacher.
    teacher_features: list[Tensor]


@dataclass(frozen=True)
class Targets:
    """What the features of a batch are compared with, beside each other."""

    # (N,) int64, equal for samples that are no negatives of each other; None: all others are negatives.
    sameness_keys: Tensor | None
    teachers: Sequence[Teacher]


@dataclass(frozen=True)
class BatchLoss:
    """The mean loss of the global batch; every rank returns it. The gradient is the sum of the ranks' gradients.

    With `feature_sizes` (Matryoshka, Kusupati et al. 2022, arXiv 2205.13147, equation 1) it is a sum of losses: one of
    the whole features, and for each size one of their first `size` numbers, normalised to unit length. If these are
    shorter than MIN_LENGTH, they are divided by MIN_LENGTH.

    With teachers, each of these losses is w * contrastive + d * distillation; w and d are `distill_weights`. If the
    objective `is_symmetric`, one `distillation_loss` computes both.
    """

    # The model, which has the logit scale and bias.
    model: ClipModel
    # Makes the context in which the loss runs.
    autocast: Callable[[], AbstractContextManager[object]]
    # See `objective`, `exchange` and `backend` of `contrastive_loss`.
    objective_name: str = "softmax"
    exchange_name: str = "auto"
    backend_name: str = "auto"
    feature_sizes: tuple[int, ...] = ()
    # How many texts of each image are its positives. Texts beyond them are hard negatives.
    captions_per_image: int = 1
    # Whether samples with equal keys are not negatives of each other.
    uses_sameness_keys: bool = False
    # The logit scale of each teacher. Without teachers the loss is the contrastive loss alone.
    teacher_scales: tuple[float, ...] = ()
    # The weights of the contrastive loss and of the distillation.
    distill_weights: tuple[float, float] = (0.0, 1.0)

    def __call__(
        self,
        image_features: Tensor,
        text_features: Tensor,
        *,
        sameness_keys: Tensor | None = None,
        teacher_features: Sequence[Tensor] = (),
    ) -> Tensor:
        """The mean loss of the global batch, from this rank's features.

        `image_features`: (N, D). `text_features`: (N k + M, D), the k captions of each image, then M hard negatives.

        `sameness_keys`: (N,) int64; see `uses_sameness_keys`. `teacher_features`: of each teacher its features of the
        pictures and the captions, (N, 2, D).
        """
        teachers = [
            (features[:, 0], features[:, 1], scale)
            for features, scale in zip(teacher_features, self.teacher_scales, strict=True)
        ]
        targets = Targets(sameness_keys if self.uses_sameness_keys else None, teachers)
        with self.autocast():
            value = self._loss_of_size(image_features, text_features, targets)
            for size in self.feature_sizes:
                images = l2_normalize(image_features[:, :size], MIN_LENGTH)
                texts = l2_normalize(text_features[:, :size], MIN_LENGTH)
                value = value + self._loss_of_size(images, texts, targets)
            return value

    def loss_of_pairs(
        self, features: Tensor, *, sameness_keys: Tensor | None = None, teacher_features: Sequence[Tensor] = ()
    ) -> Tensor:
        """The loss of features of images and captions side by side, (N, 2, D). For the other arguments see
        `__call__`."""
        images, texts = features.unbind(1)
        return self(
            images.contiguous(), texts.contiguous(), sameness_keys=sameness_keys, teacher_features=teacher_features
        )

    def _loss_of_size(self, images: Tensor, texts: Tensor, targets: Targets) -> Tensor:
        """The loss of features of one size."""
        if not targets.teachers:
            return self._contrastive(images, texts, targets)
        if OBJECTIVES[self.objective_name].is_symmetric:
            return self._distilled(images, texts, targets, self.distill_weights)
        pair_weight, teacher_weight = self.distill_weights
        terms = []
        if pair_weight:
            terms.append(pair_weight * self._contrastive(images, texts, targets))
        if teacher_weight:
            terms.append(self._distilled(images, texts, targets, (0.0, teacher_weight)))
        return sum(terms[1:], terms[0])

    def _distilled(self, images: Tensor, texts: Tensor, targets: Targets, weights: tuple[float, float]) -> Tensor:
        return distillation_loss(
            images,
            texts,
            self.model.logit_scale.exp(),
            targets.teachers,
            weights,
            exchange=self.exchange_name,
            backend="auto" if self.backend_name == "triton" else self.backend_name,
            keys=targets.sameness_keys,
            check=False,
        )

    def _contrastive(self, images: Tensor, texts: Tensor, targets: Targets) -> Tensor:
        return contrastive_loss(
            images,
            texts,
            self.model.logit_scale.exp(),
            logit_bias=self.model.logit_bias if OBJECTIVES[self.objective_name].needs_bias else None,
            objective=self.objective_name,
            exchange=self.exchange_name,
            backend=self.backend_name,
            keys=targets.sameness_keys,
            captions=self.captions_per_image,
            check=False,
        )
