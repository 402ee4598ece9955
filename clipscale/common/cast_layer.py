"""Linear layers that cast their weight once, for several passes."""

from typing import NamedTuple

from torch import Tensor


class Cast(NamedTuple):
    """A layer's weight and bias in half precision, without a graph. They replace the layer's own in a pass."""

    weight: Tensor
    bias: Tensor | None
    # True: our backward pass adds the gradient to the weight's `.grad`, which must exist. False: autograd adds it.
    accumulates: bool


class CastLayer:
    """A base of modules with a linear layer. In a pass, `cast` replaces the layer's weight and bias."""

    cast: Cast | None = None

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """The layer's weight (outputs, inputs) and bias (outputs,)."""
        raise NotImplementedError
