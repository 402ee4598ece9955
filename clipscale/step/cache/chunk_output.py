"""The output of an encoder for a chunk: representations, and a loss of its own."""

from typing import Any, NamedTuple

from torch import Tensor


class ChunkOutput(NamedTuple):
    """An encoder of `GradCache` may return this in a pass with a graph (`torch.is_grad_enabled()`). In a pass without
    one it returns the representations alone, and need not compute the loss.

    The loss is any sum over samples, for example of the captions' cross entropies. Draw its random numbers after those
    of the representations. An encoder that then restores the random state draws the same numbers whether graphs are
    kept or not.
    """

    # A tensor (samples, ...), or what `representation` takes.
    representations: Any
    # The chunk's own loss, 0-d: a sum over its samples alone, so that the chunks' losses add up to the batch's. None if
    # it has none.
    loss: Tensor | None = None
