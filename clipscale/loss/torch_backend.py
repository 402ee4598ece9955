"""The torch backend: a block worked through tile by tile, on any device, for every objective and similarity.

With tiles the extra memory is two tiles. As `dense` the one tile is the whole block: the two methods whose memory is quadratic, and a
second way through the same formulas.
"""

from collections.abc import Iterator

from torch import Tensor

from clipscale.loss.block import Block, exclude_duplicates
from clipscale.loss.objective import Objective
from clipscale.loss.similarity import Dot, Similarity


class TorchBackend:
    """The two functions of a backend, written over an objective and a similarity.

    `tile` is the side of the tiles; None leaves it to the similarity; 0 takes each block whole. With `keep` (for the dot product and a
    single visit to a single tile) the scores stay in memory between the passes, as in a plain graph: three matmuls instead of four.
    """

    def __init__(
        self, objective: Objective, similarity: Similarity, tile: int | None = None, keep: bool = False
    ) -> None:
        self.objective, self.similarity, self.side = objective, similarity, tile
        # A module's tiles must be the same in both passes, or its random numbers go astray.
        self.splits = tile != 0 and similarity.homogeneous
        self.sums_scale_grad = not similarity.homogeneous
        self.keep = keep and tile == 0 and isinstance(similarity, Dot)
        self._kept: Tensor | None = None
        self._buffers: list[Tensor] = []

    def merge(self, block: Block) -> None:
        """Merge the block into its rows' and columns' log-sum-exps (Side.lse) and its rows' targets, in place."""
        bound = self.similarity.bound(block)
        for tile in self._tiles(block):
            out, spare = self._scratch(tile)
            scores = self.similarity.scores(tile, out)
            if self.keep:
                self._kept = scores[0].clone()
            tile_bound = _bound(scores) if bound is None else bound
            exclude_duplicates(scores, tile)
            self.objective.merge(scores, tile, tile_bound, spare)
        self._buffers = []

    def add_gradients(self, block: Block) -> None:
        """Add the block's part of the gradients to every `grad` that is wanted, in place, given both complete log-sum-exps."""
        bound = self.similarity.bound(block)
        for tile in self._tiles(block):
            out, spare = self._scratch(tile)
            scores, pull = self.similarity.linearise(tile, out, self._kept)
            self._kept = None
            tile_bound = _bound(scores) if bound is None else bound
            exclude_duplicates(scores, tile)
            pull(self.objective.gradient(scores, tile, tile_bound, spare))
        self._buffers = []

    def _tiles(self, block: Block) -> Iterator[Block]:
        n, m = len(block.rows), len(block.cols)
        height, width = self.similarity.tile(block) if self.side is None else (self.side or n, self.side or m)
        for row in range(0, n, height):
            for col in range(0, m, width):
                yield block.tile(row, height, col, width)

    def _scratch(self, tile: Block) -> tuple[Tensor, Tensor]:
        """Two tensors of the tile's shape; the first tile of a block is the largest and brings the memory."""
        n, m = len(tile.rows), len(tile.cols)
        if not self._buffers:
            self._buffers = [tile.shared.scale.new_empty(n * m) for _ in range(2)]
        return self._buffers[0][: n * m].view(n, m), self._buffers[1][: n * m].view(n, m)


def _bound(scores: list[Tensor]) -> float:
    """The largest |score|."""
    return max(abs(float(x)) for score in scores for x in score.aminmax())
