"""The objectives, by their names in `contrastive_loss` and in the setting `loss.objective`. Imports no torch."""

from clipscale.loss.objective import Objective
from clipscale.loss.sigmoid import Sigmoid
from clipscale.loss.softmax import Softmax

OBJECTIVES: dict[str, Objective] = {
    "softmax": Softmax((0.5, 0.5)),
    "softmax_image": Softmax((1.0, None)),
    "softmax_text": Softmax((None, 1.0)),
    "sigmoid": Sigmoid(),
}
