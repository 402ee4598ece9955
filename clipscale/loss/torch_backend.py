"""The torch backend computes a block tile by tile, on any device, for every objective and similarity.

With tiles the extra memory is two tiles. As `dense` one tile is the whole block, with memory quadratic in the batch.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from clipscale.loss.block import Block, exclude_duplicates
from clipscale.loss.kept import Kept
from clipscale.loss.machine import Machine
from clipscale.loss.objective import Objective, Sigmoid
from clipscale.loss.similarity import Dot, Similarity


class TorchBackend:
    """The functions of a backend, written over an objective and a similarity.

    `tile` is the side of the tiles; None: the similarity's choice; 0: the whole block. With `keep` (for the dot product and a single
    visit to a single tile) the scores stay in memory between the passes, as in a plain graph: three matmuls instead of four. `kept` does
    the same, for the dot product, with exponentials of as many tiles as fit its budget.
    """

    def __init__(
        self,
        objective: Objective,
        similarity: Similarity,
        tile: int | None = None,
        keep: bool = False,
        machine: Machine | None = None,
        kept: Kept | None = None,
    ) -> None:
        self.objective, self.similarity, self.tile = objective, similarity, tile
        self.machine = machine or Machine()
        # A module's tiles must be the same in both passes, or they would draw other random numbers.
        self.splits_rows = tile != 0 and similarity.homogeneous
        self.sums_scale_grad = not similarity.homogeneous
        self.sums_pairs = isinstance(objective, Sigmoid)
        self.keep = keep and tile == 0 and isinstance(similarity, Dot)
        self.kept = kept if kept is not None and not self.keep and isinstance(similarity, Dot) else Kept()
        self._kept: Tensor | None = None
        self._buffers: list[Tensor] = []

    def padded_width(self, features: Tensor) -> int:
        return features.shape[-1]

    def warm_up(self, block: Block) -> None:
        """Nothing is compiled."""

    def forward(self, block: Block) -> None:
        """Merge the block into the log-sum-exps of its rows and columns and into its rows' targets, in place."""
        bound = self.similarity.bound(block)
        for tile in self._tiles(block):
            out, spare = self._scratch(tile)
            scores = self.similarity.scores(tile, out)
            if self.keep:
                self._kept = scores[0].clone()
            tile_bound = _bound(scores) if bound is None else bound
            exclude_duplicates(scores, tile)
            found = self.objective.forward(scores, tile, tile_bound, spare)
            if found is not None:
                self.kept.add(*found, tile, block)
        self._buffers = []

    def backward(self, block: Block) -> None:
        """Add the block's part of the gradients to every `grad` that is not None, in place, given both complete log-sum-exps."""
        self._differentiate(block, self.objective.backward)

    def forward_backward(self, block: Block) -> None:
        """Both in one pass over the tiles, for a sum over pairs."""
        assert isinstance(self.objective, Sigmoid)
        self._differentiate(block, self.objective.forward_backward)

    def _differentiate(self, block: Block, derivative: Callable[..., list[Tensor]]) -> None:
        bound = self.similarity.bound(block)
        for tile in self._tiles(block):
            out, spare = self._scratch(tile)
            if self._differentiated_from_kept(tile, out, spare):
                continue
            scores, vjp = self.similarity.vjp(tile, out, self._kept)
            self._kept = None
            tile_bound = _bound(scores) if bound is None else bound
            exclude_duplicates(scores, tile)
            vjp(derivative(scores, tile, tile_bound, spare))
        self._buffers = []

    def _differentiated_from_kept(self, tile: Block, out: Tensor, spare: Tensor) -> bool:
        """Whether the tile's exponentials were kept and of use; then its gradients are added."""
        reference = self.kept.take(tile, out)
        if reference is None or isinstance(self.objective, Sigmoid):
            return False
        grads = self.objective.backward_from(out, reference, tile, spare)
        if grads is None:
            return False
        _, vjp = self.similarity.vjp(tile, out, out)
        vjp(grads)
        return True

    def _tiles(self, block: Block) -> Iterator[Block]:
        n, m = len(block.rows), len(block.cols)
        height, width = self.tile or n, self.tile or m
        if self.tile is None:
            on_gpu = self.machine.gpu_name(block.rows.features.device) is not None
            height, width = self.similarity.tile_shape(block, on_gpu)
        corners = ((row, col) for row in range(0, n, height) for col in range(0, m, width))
        return self.machine.parts(block.tile(row, height, col, width) for row, col in corners)

    def _scratch(self, tile: Block) -> tuple[Tensor, Tensor]:
        """Two tensors of the tile's shape. The first tile of a block is the largest and allocates them."""
        n, m = len(tile.rows), len(tile.cols)
        if not self._buffers:
            self._buffers = [tile.parameters.scale.new_empty(n * m) for _ in range(2)]
        return self._buffers[0][: n * m].view(n, m), self._buffers[1][: n * m].view(n, m)


def _bound(scores: list[Tensor]) -> float:
    """The largest |score|."""
    return max(abs(float(x)) for score in scores for x in score.aminmax())
