"""The words of `contrastive_loss` and of the settings `loss.*`, and the objectives by their names. Imports no torch."""

from clipscale.loss.objective import Objective
from clipscale.loss.sigmoid import Sigmoid
from clipscale.loss.softmax import Softmax

EXCHANGES = ("auto", "none", "replicated", "local", "gather", "ring", "nodes")
GATHER_BYTES = 5 << 30
"""Most memory for the texts of all ranks and their gradients where `auto` gathers across nodes."""
BACKENDS = ("auto", "dense", "tiled", "triton")
SHARED = ("ignore", "mask", "positive")
OBJECTIVES: dict[str, Objective] = {
    "softmax": Softmax((0.5, 0.5)),
    "softmax_image": Softmax((1.0, None)),
    "softmax_text": Softmax((None, 1.0)),
    "sigmoid": Sigmoid(),
}


def exchange_of(nodes: int, texts: int, width: int, itemsize: int) -> str:
    """What `auto` is for the texts (of all ranks) of a group over so many nodes.

    Within a node a ring: it takes least memory. Across nodes a ring in rank order sends all texts through one network
    card of a node. All cards share in a gather, where its memory is small (a million of 768 numbers in half precision
    take 4.5 GiB with their float32 gradients), and otherwise in a ring of each rank with its like in the other nodes.
    """
    if nodes == 1:
        return "ring"
    return "gather" if texts * width * (itemsize + 4) <= GATHER_BYTES else "nodes"
