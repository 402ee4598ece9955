"""A layer whose weight may be cast once for several passes, beside the cast."""

from typing import NamedTuple

from torch import Tensor


class Cast(NamedTuple):
    """A layer's weight and bias in half precision."""

    weight: Tensor
    bias: Tensor | None
    # The backward pass adds to the weight's `.grad`, which is there. Otherwise autograd does, as always.
    adds: bool


class CastLayer:
    """A base of modules with a linear layer. `cast` takes the place of its weights for a pass."""

    cast: Cast | None = None

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """The layer's weight (outputs, inputs) and bias (outputs,)."""
        raise NotImplementedError
