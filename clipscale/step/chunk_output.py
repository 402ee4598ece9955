"""What an encoder returns of a chunk: representations, and a loss of its own."""

from typing import Any, NamedTuple

from torch import Tensor


class ChunkOutput(NamedTuple):
    """What an encoder of `GradCache` may return with a graph (`torch.is_grad_enabled()`). Without one it returns the
    representations alone, and need not compute the loss.

    The loss is any sum over samples: of a caption's tokens, of a penalty. Its random numbers come after those of the
    representations. An encoder that restores the random state after it draws the same numbers whether graphs are kept
    or not.
    """

    # A tensor (samples, ...), or what `representation` takes.
    representations: Any
    # Of this chunk's samples alone, 0-d: the batch's is the sum of the chunks'. None: there is none.
    loss: Tensor | None = None
