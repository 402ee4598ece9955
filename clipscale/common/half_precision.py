"""Half precision: linear layers that cast their weight once for several passes, and a product added in float32."""

from typing import NamedTuple

import torch
from torch import Tensor


class HalfWeights(NamedTuple):
    """A layer's weight and bias in half precision, without a graph. They replace the layer's own in a pass."""

    weight: Tensor
    bias: Tensor | None
    # True: our backward pass adds the gradient to the weight's `.grad`, which must exist. False: autograd adds it.
    accumulates: bool


class CastLayer:
    """A base of modules with a linear layer. In a pass, `half_weights` replace the layer's weight and bias."""

    half_weights: HalfWeights | None = None
    # False for a module that calls its linear layer as a module, which has half weights of its own.
    accepts_half_weights: bool = True

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """The layer's weight (outputs, inputs) and bias (outputs,)."""
        raise NotImplementedError


def add_half_product(total: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> None:
    """total (float32) += factor * a b, by one call of a GPU's GEMM library: the product is not rounded before."""
    torch.addmm(total, a, b, out_dtype=torch.float32, alpha=factor, out=total)
