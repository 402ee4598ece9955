"""The functions of an objective on one tile of scores, in torch.

Scores x (n, m) are scale * similarity, and -inf where a pair is left out. Both functions may overwrite them. Values and
gradients leave out the common factor 1/N, which keeps the weights near one in any precision.

Letters: n rows (images) and m columns (texts) of the tile.
"""

from torch import Tensor

from clipscale.loss.block import Block


class TileOps:
    """An objective's two functions. `bound`: an upper bound of |x| over the scores that are not left out. `scratch`: a
    buffer of the scores' shape."""

    def forward(self, scores: Tensor, tile: Block, bound: float, scratch: Tensor) -> None:
        """Add a tile's scores to the running log-sum-exps, and subtract its positives from `row_loss`."""
        raise NotImplementedError

    def backward(self, scores: Tensor, tile: Block, bound: float, scratch: Tensor) -> Tensor:
        """N times the derivative of the loss with respect to the scores, given the complete log-sum-exps.

        It may be the scores' own memory. A pairwise objective also adds its loss to `row_loss`; with a bias, its
        gradient to `bias_grad`.
        """
        raise NotImplementedError
