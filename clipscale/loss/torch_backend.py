"""The torch backend computes a block tile by tile, on any device, for every objective and similarity.

The extra memory is a few tiles, two of them buffers. With `is_dense` one tile is the whole block, so the memory is
quadratic in the batch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from clipscale.loss.block import Block
from clipscale.loss.runtime import LossRuntime
from clipscale.loss.similarity import Similarity
from clipscale.loss.tile import TileOps


class TorchBackend:
    """The two functions of a backend, for an objective's tile functions and a similarity. `is_dense`: one tile."""

    def __init__(self, tile_ops: TileOps, similarity: Similarity, runtime: LossRuntime, is_dense: bool) -> None:
        self.tile_ops = tile_ops
        self.similarity = similarity
        self.runtime = runtime
        self.is_dense = is_dense

    def forward(self, block: Block) -> None:
        """Merge the block into the log-sum-exps of its rows and columns and into `row_loss`, in place."""
        bound = self.similarity.bound(block)
        for tile, scores_buffer, scratch in self._tiles(block):
            scores = self.similarity.scores(tile, scores_buffer)
            tile_bound = _mask_pairs(scores, tile, bound)
            self.tile_ops.forward(scores, tile, tile_bound, scratch)

    def backward(self, block: Block) -> None:
        """Add the block's part to every gradient that is not None, in place, given both complete log-sum-exps.

        A pairwise objective also adds its loss to `row_loss`.
        """
        bound = self.similarity.bound(block)
        for tile, scores_buffer, scratch in self._tiles(block):
            scores, vjp = self.similarity.vjp(tile, scores_buffer)
            tile_bound = _mask_pairs(scores, tile, bound)
            score_grad = self.tile_ops.backward(scores, tile, tile_bound, scratch)
            vjp(score_grad)

    def _tiles(self, block: Block) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """Each tile, and two tensors of its shape to write to."""
        n = len(block.rows)
        m = len(block.cols)
        if self.is_dense:
            height = n
            width = m
        else:
            height, width = self.similarity.tile_shape(self.runtime.is_gpu(block.rows.features.device))
        buffers = block.parameters.scale.new_empty(2, min(n, height) * min(m, width))
        for tile in self.runtime.tiles_to_run(block.split(height, width)):
            rows = len(tile.rows)
            cols = len(tile.cols)
            scores_buffer, scratch = buffers[:, : rows * cols].unflatten(1, (rows, cols))
            yield tile, scores_buffer, scratch


def _mask_pairs(scores: Tensor, tile: Block, bound: float | None) -> float:
    """Set the scores of pairs that are left out to -inf, in place. Returns a bound of |score| of the others: the
    block's, or if that is unknown the tile's own."""
    if bound is None:
        lowest, highest = scores.aminmax()
        bound = max(abs(float(lowest)), abs(float(highest)))
    masked_pairs = tile.masked_pairs()
    if masked_pairs is not None:
        scores.masked_fill_(masked_pairs, -torch.inf)
    return bound
