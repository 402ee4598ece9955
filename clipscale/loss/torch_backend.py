"""The torch backend computes a block tile by tile, on any device, for every objective and similarity.

With tiles the extra memory is two tiles. As `dense` one tile is the whole block, with memory quadratic in the batch.
"""

from collections.abc import Iterator

from torch import Tensor

from clipscale.loss.block import Block
from clipscale.loss.machine import Machine
from clipscale.loss.objective import Objective
from clipscale.loss.shared import leave_out
from clipscale.loss.similarity import Similarity


class TorchBackend:
    """The two functions of a backend, written over an objective and a similarity. `dense`: one tile a block."""

    width_step = 1
    """The width of features is padded to a multiple of this."""

    def __init__(
        self, objective: Objective, similarity: Similarity, machine: Machine, dense: bool, leaves_out: bool = False
    ) -> None:
        """leaves_out: pairs with equal keys that are no positives."""
        self.objective, self.similarity, self.dense, self.leaves_out = objective, similarity, dense, leaves_out
        self.machine = machine
        self.sums_scale_grad = not similarity.homogeneous
        """Whether `backward` sums the scale's gradient; otherwise scale dL/dscale = sum_i <u_i, dU_i> gives it."""
        self.sums_pairs = objective.sums_pairs
        """Whether the value is a sum over pairs, and found by `backward`, with the gradients."""
        self.other_lses = objective.other_lses
        """How many log-sum-exps `forward` collects for a row beside its own."""
        self._buffers: list[Tensor] = []

    def missing_factor(self, scale: Tensor) -> Tensor | float:
        """What the sums of feature gradients are still to be multiplied by."""
        return 1.0

    def forward(self, block: Block) -> None:
        """Merge the block into the log-sum-exps of its rows and columns and into its rows' targets, in place."""
        bound = self.similarity.bound(block)
        for tile in self._tiles(block):
            out, spare = self._scratch(tile)
            scores = self.similarity.scores(tile, out)
            tile_bound = _bound(scores) if bound is None else bound
            if self.leaves_out:
                leave_out(scores, tile)
            self.objective.forward(scores, tile, tile_bound, spare)
        self._buffers = []

    def backward(self, block: Block) -> None:
        """Add the block's part to every gradient that is not None, in place, given both complete log-sum-exps.

        Of a sum over pairs, also the block's part of the value, where the rows have targets.
        """
        bound = self.similarity.bound(block)
        for tile in self._tiles(block):
            out, spare = self._scratch(tile)
            scores, vjp = self.similarity.vjp(tile, out)
            tile_bound = _bound(scores) if bound is None else bound
            if self.leaves_out:
                leave_out(scores, tile)
            vjp(self.objective.backward(scores, tile, tile_bound, spare))
        self._buffers = []

    def _tiles(self, block: Block) -> Iterator[Block]:
        n, m = height, width = len(block.rows), len(block.cols)
        if not self.dense:
            on_gpu = self.machine.is_gpu(block.rows.features.device)
            height, width = self.similarity.tile_shape(block, on_gpu)
        corners = ((row, col) for row in range(0, n, height) for col in range(0, m, width))
        return self.machine.parts(block.tile(row, height, col, width) for row, col in corners)

    def _scratch(self, tile: Block) -> tuple[Tensor, Tensor]:
        """Two tensors of the tile's shape. The first tile of a block is the largest and allocates them."""
        n, m = len(tile.rows), len(tile.cols)
        if not self._buffers:
            self._buffers = [tile.parameters.scale.new_empty(n * m) for _ in range(2)]
        return self._buffers[0][: n * m].view(n, m), self._buffers[1][: n * m].view(n, m)


def _bound(scores: Tensor) -> float:
    """The largest |score|."""
    return max(abs(float(x)) for x in scores.aminmax())
