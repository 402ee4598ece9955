"""The words of `contrastive_loss` and of the settings `loss.*`, and the objectives by their names. Imports no torch."""

from clipscale.loss.objective import Objective
from clipscale.loss.sigmoid import Sigmoid
from clipscale.loss.softmax import Softmax

EXCHANGES = ("auto", "none", "replicated", "local", "gather", "ring")
BACKENDS = ("auto", "dense", "tiled", "triton")
SHARED = ("ignore", "mask", "positive")
OBJECTIVES: dict[str, Objective] = {
    "softmax": Softmax((0.5, 0.5)),
    "softmax_image": Softmax((1.0, None)),
    "softmax_text": Softmax((None, 1.0)),
    "sigmoid": Sigmoid(),
}
