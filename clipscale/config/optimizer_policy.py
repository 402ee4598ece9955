"""What the start of a run does with the optimizer's state in its checkpoint."""

from enum import Enum


class OptimizerPolicy(Enum):
    """What a start does with the optimizer's state in the checkpoint. CONTINUE and RESTART are words of `stages`."""

    # Take all of it, within a stage.
    RESUME = "resume"
    # Take it at the start of a stage, except the state of position embeddings that are resized.
    CONTINUE = "continue"
    # Take none of it, at the start of a stage.
    RESTART = "restart"
