"""What the start of a run does with the optimizer's state in its checkpoint."""

from enum import Enum


class OptimizerPolicy(Enum):
    """What a start does with the optimizer's state in the checkpoint. The values are the words of `stages`."""

    # Within a stage: takes all of it.
    RESUME = "resume"
    # At the start of a stage: takes it, but for position embeddings that are resized.
    CONTINUE = "continue"
    # At the start of a stage: takes none of it.
    RESTART = "restart"
