"""Distillation: cross-entropy to the mean of K teachers' probabilities instead of the pairs.

MobileCLIP; Vasu et al. 2023, arXiv 2311.17049 (open_clip's DistillClipLoss).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clipscale.loss.distillation.tile import DistillationTile
from clipscale.loss.inputs import Inputs
from clipscale.loss.objective import Objective

Teacher = tuple[Tensor, Tensor, float]
"""Features of images and of texts, and the logit scale."""


@dataclass(frozen=True)
class Distillation(Objective):
    """L = sum_i a_i (r_i - sum_j P_ij x_ij) + sum_j b_j (c_j - sum_i Q_ij x_ij)

    P is the mean over teachers of softmax_j(y), Q that of softmax_i(y), with a teacher's scores y = t <its feature of
    image i, its feature of text j>. It collects the log-sum-exps of the student's and of the teachers' scores.
    """

    teachers: tuple[tuple[int, float], ...] = ()
    """The feature width and the logit scale t of each, whose features are side by side in RowBlock.extra."""

    @classmethod
    def of(cls, teachers: Sequence[Teacher]) -> "Distillation":
        widths = tuple((a.shape[1], float(t)) for a, _, t in teachers)
        return cls((0.5, 0.5), log_sum_exps=1 + len(widths), teachers=widths)

    def tile(self) -> DistillationTile:
        return DistillationTile(self.teachers)


def with_teachers(inputs: Inputs, teachers: Sequence[Teacher]) -> Inputs:
    """With the teachers' features, in one type. Raises ValueError where they do not fit."""
    n, m = len(inputs.rows), len(inputs.cols)
    for a, b, _ in teachers:
        if a.shape != (n, b.shape[-1]) or b.shape != (m, a.shape[-1]) or a.device != inputs.scale.device:
            raise ValueError(f"a teacher's features {tuple(a.shape)} and {tuple(b.shape)} for {n} images and {m} texts")
    images, texts = torch.cat([a for a, _, _ in teachers], 1), torch.cat([b for _, b, _ in teachers], 1)
    is_double = inputs.dtype == torch.float64
    dtype = torch.float64 if is_double else torch.promote_types(images.dtype, texts.dtype)
    rows, cols = (replace(side, extra=x.to(dtype)) for side, x in ((inputs.rows, images), (inputs.cols, texts)))
    return replace(inputs, rows=rows, cols=cols)
