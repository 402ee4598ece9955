"""What the start of a run does with the optimizer's state in its checkpoint."""

from enum import Enum


class OptimizerPolicy(Enum):
    """What a start does with the optimizer's state in the checkpoint.

    `continue` and `restart` are also the values of the stages' setting `optimizer`.
    """

    # Take all of it: the start goes on within a stage.
    TAKE_ALL = "resume"
    # Begin a stage with the state that fits. The state of position embeddings that are resized does not fit.
    TAKE_FITTING = "continue"
    # Begin a stage without any of it.
    TAKE_NONE = "restart"
