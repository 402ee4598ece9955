"""The torch backend computes a block tile by tile, on any device, for every objective and similarity.

With tiles the extra memory is two tiles. As `dense` one tile is the whole block, with memory quadratic in the batch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from clipscale.loss.block import Block
from clipscale.loss.runtime import LossRuntime
from clipscale.loss.similarity import Similarity
from clipscale.loss.tile import TorchObjective


class TorchBackend:
    """The two functions of a backend, written over an objective's tile and a similarity. `dense`: one tile a block."""

    def __init__(self, objective: TorchObjective, similarity: Similarity, runtime: LossRuntime, dense: bool) -> None:
        self.objective = objective
        self.similarity = similarity
        self.runtime = runtime
        self.dense = dense

    def forward(self, block: Block) -> None:
        """Merge the block into the log-sum-exps of its rows and columns and into its rows' targets, in place."""
        bound = self.similarity.bound(block)
        for tile, out, scratch in self._tiles(block):
            scores = self.similarity.scores(tile, out)
            self.objective.forward(scores, tile, _mask_pairs(scores, tile, bound), scratch)

    def backward(self, block: Block) -> None:
        """Add the block's part to every gradient that is not None, in place, given both complete log-sum-exps.

        It also adds to the rows' targets if the value has terms of single pairs.
        """
        bound = self.similarity.bound(block)
        for tile, out, scratch in self._tiles(block):
            scores, vjp = self.similarity.vjp(tile, out)
            vjp(self.objective.backward(scores, tile, _mask_pairs(scores, tile, bound), scratch))

    def _tiles(self, block: Block) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """Each tile, and two tensors of its shape to write to."""
        n = height = len(block.rows)
        m = width = len(block.cols)
        if not self.dense:
            height, width = self.similarity.tile_shape(self.runtime.is_gpu(block.rows.features.device))
        buffers = block.parameters.scale.new_empty(2, min(n, height) * min(m, width))
        for tile in self.runtime.tiles_to_run(block.tiles(height, width)):
            shape = len(tile.rows), len(tile.cols)
            out, scratch = buffers[:, : shape[0] * shape[1]].unflatten(1, shape)
            yield tile, out, scratch


def _mask_pairs(scores: Tensor, tile: Block, bound: float | None) -> float:
    """Set the scores of pairs that are left out to -inf, in place. Returns a bound of the others' size, the block's if
    that is known."""
    if bound is None:
        bound = max(abs(float(x)) for x in scores.aminmax())
    masked_pairs = tile.masked_pairs()
    if masked_pairs is not None:
        scores.masked_fill_(masked_pairs, -torch.inf)
    return bound
