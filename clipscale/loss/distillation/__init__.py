"""Distillation: cross-entropy to the mean of K teachers' probabilities instead of the pairs.

MobileCLIP; Vasu et al. 2023, arXiv 2311.17049 (open_clip's DistillClipLoss).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipscale.loss.objective import Objective

if TYPE_CHECKING:
    from clipscale.loss.tile import ObjectiveTile


@dataclass(frozen=True)
class Distillation(Objective):
    """L = sum_i a_i (r_i - sum_j P_ij x_ij) + sum_j b_j (c_j - sum_i Q_ij x_ij)

    P is the mean over teachers of softmax_j(y), Q that of softmax_i(y), with a teacher's scores y = t <its feature of
    image i, its feature of text j>. It collects the log-sum-exps of the student's and of the teachers' scores.
    """

    teachers: tuple[tuple[int, float], ...] = ()
    """The feature width and the logit scale t of each."""

    def tile(self) -> "ObjectiveTile":
        from clipscale.loss.distillation.tile import DistillationTile

        return DistillationTile(self.teachers)
