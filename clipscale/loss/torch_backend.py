"""The torch backend computes a block tile by tile, on any device, for every objective and similarity.

With tiles the extra memory is two tiles. As `dense` one tile is the whole block, with memory quadratic in the batch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from clipscale.loss.block import Block
from clipscale.loss.machine import Machine
from clipscale.loss.similarity import Similarity
from clipscale.loss.tile import ObjectiveTile


class TorchBackend:
    """The two functions of a backend, written over an objective's tile and a similarity. `dense`: one tile a block."""

    def __init__(self, objective: ObjectiveTile, similarity: Similarity, machine: Machine, dense: bool) -> None:
        self.objective, self.similarity, self.machine, self.dense = objective, similarity, machine, dense
        self._buffers: list[Tensor] = []

    def forward(self, block: Block) -> None:
        """Merge the block into the log-sum-exps of its rows and columns and into its rows' targets, in place."""
        bound = self.similarity.bound(block)
        for tile in self._tiles(block):
            out, spare = self._scratch(tile)
            scores = self.similarity.scores(tile, out)
            tile_bound = _leave_out(scores, tile, bound)
            self.objective.forward(scores, tile, tile_bound, spare)
        self._buffers = []

    def backward(self, block: Block) -> None:
        """Add the block's part to every gradient that is not None, in place, given both complete log-sum-exps.

        Also to the rows' targets, where the value has terms of single pairs.
        """
        bound = self.similarity.bound(block)
        for tile in self._tiles(block):
            out, spare = self._scratch(tile)
            scores, vjp = self.similarity.vjp(tile, out)
            tile_bound = _leave_out(scores, tile, bound)
            vjp(self.objective.backward(scores, tile, tile_bound, spare))
        self._buffers = []

    def _tiles(self, block: Block) -> Iterator[Block]:
        n, m = height, width = len(block.rows), len(block.cols)
        if not self.dense:
            on_gpu = self.machine.is_gpu(block.rows.features.device)
            height, width = self.similarity.tile_shape(on_gpu)
        corners = ((row, col) for row in range(0, n, height) for col in range(0, m, width))
        return self.machine.parts(block.tile(row, height, col, width) for row, col in corners)

    def _scratch(self, tile: Block) -> tuple[Tensor, Tensor]:
        """Two tensors of the tile's shape. The first tile of a block is the largest and allocates them."""
        n, m = len(tile.rows), len(tile.cols)
        if not self._buffers:
            self._buffers = [tile.parameters.scale.new_empty(n * m) for _ in range(2)]
        return self._buffers[0][: n * m].view(n, m), self._buffers[1][: n * m].view(n, m)


def _leave_out(scores: Tensor, tile: Block, bound: float | None) -> float:
    """Set the scores of pairs that are left out to -inf, in place. Returns a bound of the others' size, the block's if
    that is known."""
    if bound is None:
        bound = max(abs(float(x)) for x in scores.aminmax())
    left_out = tile.left_out()
    if left_out is not None:
        scores.masked_fill_(left_out, -torch.inf)
    return bound
