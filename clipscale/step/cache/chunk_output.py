"""The output of an encoder for a chunk: representations, and a loss of its own."""

from typing import Any, NamedTuple

from torch import Tensor


class ChunkOutput(NamedTuple):
    """An encoder of `GradCache` may return this in a pass with a graph (`torch.is_grad_enabled()`). In a pass without
    a graph it may return the representations alone; a loss that it returns there is not read.

    The loss is any sum over samples, for example of the captions' cross entropies. If it draws random numbers, it draws
    them after the representations have drawn theirs, and then restores the random state. So the next chunk draws the
    same numbers whether this chunk's graph is kept or not.
    """

    # A tensor (samples, ...), or what `representation` takes.
    representations: Any
    # The chunk's own loss, 0-d: a sum over its samples alone, so that the chunks' losses add up to the batch's. None:
    # the chunk has none.
    loss: Tensor | None = None
