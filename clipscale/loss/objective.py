"""What an objective says of itself to the loss, the settings and the planner. Imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from clipscale.loss.tile import ObjectiveTile
    from clipscale.loss.triton.backend import TritonBackend


@dataclass(frozen=True)
class Objective:
    """The facts of an objective. Its subclass, in a folder of its own, has the formula, the torch tile and the kernels.

    Adding one: a folder with the subclass (softmax/__init__.py) and the tile (softmax/tile.py), and a line in
    objectives.py. A kernel may follow (softmax/kernel.py).
    """

    weights: tuple[float | None, float | None] = (None, None)
    """N times the weight of the softmax over each row and over each column; None: there is none."""
    log_sum_exps: int = 0
    """How many the first sweep collects for a row or column with a weight; 0: there is no first sweep."""
    pairwise: bool = True
    """The value has terms of single pairs, which the sweep of the gradients finds, in the forward pass."""
    needs_bias: bool = False
    """Takes a logit bias, which is trained."""
    has_kernels: bool = False
    """There are Triton kernels for the dot product."""

    @property
    def sweeps(self) -> int:
        """Over all scores, in a step of training. Each computes the scores once; gradients are counted beside."""
        return 2 if self.log_sum_exps else 1

    def dense(self, scores: "Tensor", positive: "Tensor", paired: int) -> "Tensor":
        """The value by the formula, for tests: of the scores (N, M), -inf where a pair is left out. positive: (N, M)
        bool; the first `paired` texts belong to an image."""
        raise NotImplementedError

    def tile(self) -> "ObjectiveTile":
        """What it does with a tile of scores, in torch."""
        raise NotImplementedError

    def kernels(self) -> "type[TritonBackend]":
        """The backend with its Triton kernels. Imports Triton."""
        raise NotImplementedError
