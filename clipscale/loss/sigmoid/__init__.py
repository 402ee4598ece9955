"""Sigmoid: every pair is a binary question, whether image and text belong together.

SigLIP; Zhai et al. 2023, arXiv 2303.15343.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipscale.loss.objective import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from clipscale.loss.tile import ObjectiveTile
    from clipscale.loss.triton.backend import TritonBackend


@dataclass(frozen=True)
class Sigmoid(Objective):
    """L = sum_ij softplus(-z_ij (x_ij + bias)) / N, where z is 1 at the positives and -1 elsewhere."""

    needs_bias: bool = True
    has_kernels: bool = True

    def dense(self, scores: "Tensor", positive: "Tensor", paired: int) -> "Tensor":
        """The scores with the bias."""
        from torch.nn.functional import binary_cross_entropy_with_logits

        left_out = scores.isneginf()
        logits = scores.masked_fill(left_out, 0)
        terms = binary_cross_entropy_with_logits(logits, positive.to(logits.dtype), reduction="none")
        return terms.masked_fill(left_out, 0).sum() / len(scores)

    def tile(self) -> "ObjectiveTile":
        from clipscale.loss.sigmoid.tile import SigmoidTile

        return SigmoidTile()

    def kernels(self) -> "type[TritonBackend]":
        from clipscale.loss.sigmoid.kernel import TritonSigmoid

        return TritonSigmoid
