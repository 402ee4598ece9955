"""The sigmoid's tile: its part of the value and the gradient of its scores at once. No pair needs another's scores.

    N dL/dx_ij = sigmoid(x_ij + bias) - [j belongs to i]

Letters: n rows (images) and m columns (texts) of the tile.
"""

import torch
from torch import Tensor

from clipscale.loss.block import Block
from clipscale.loss.tile import TileOps


class SigmoidTileOps(TileOps):
    """The sigmoid's function on a tile: `backward` computes value and gradient, and there is no `forward`."""

    def backward(self, scores: Tensor, tile: Block, bound: float, scratch: Tensor) -> Tensor:
        positives = tile.positive_pairs()
        logits = scores.add_(tile.parameters.bias)
        logits[positives] = -logits[positives]  # -z (x + bias)
        if tile.rows.row_loss is not None:
            tile.rows.row_loss += torch.logaddexp(logits, logits.new_zeros(()), out=scratch).sum(1)
        g = logits.sigmoid_()
        g[positives] = -g[positives]  # sigmoid(y) - 1 is -sigmoid(-y), without the cancellation
        if tile.parameters.bias_grad is not None:
            tile.parameters.bias_grad += g.sum()
        return g
