"""Softmax: cross-entropy of an image's text among all texts, of a text's image among all images, or of both.

CLIP; Radford et al. 2021, arXiv 2103.00020. Several positives: the outer form of SupCon, arXiv 2004.11362, eq. 2.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipscale.loss.objective import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from clipscale.loss.tile import ObjectiveTile
    from clipscale.loss.triton.backend import TritonBackend


@dataclass(frozen=True)
class Softmax(Objective):
    """L = sum_i a_i (r_i - x_ii) + sum_j b_j (c_j - x_jj), with the log-sum-exps r of rows and c of columns."""

    log_sum_exps: int = 1
    pairwise: bool = False
    has_kernels: bool = True

    def dense(self, scores: "Tensor", positive: "Tensor", paired: int) -> "Tensor":
        row_weight, col_weight = self.weights
        value = scores.new_zeros(())
        if row_weight is not None:
            value = value + row_weight * one_sided(scores, positive)
        if col_weight is not None:
            value = value + col_weight * one_sided(scores.T[:paired], positive.T[:paired])
        return value

    def tile(self) -> "ObjectiveTile":
        from clipscale.loss.softmax.tile import SoftmaxTile

        return SoftmaxTile()

    def kernels(self) -> "type[TritonBackend]":
        from clipscale.loss.softmax.kernel import TritonSoftmax

        return TritonSoftmax


def one_sided(scores: "Tensor", positive: "Tensor") -> "Tensor":
    """The mean over rows of the log-sum-exp less the mean of the positives' scores; scores and positive (N, M)."""
    positives = scores.masked_fill(~positive, 0).sum(1) / positive.sum(1)
    return (scores.logsumexp(1) - positives).mean()
