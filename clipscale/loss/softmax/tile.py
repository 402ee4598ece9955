"""The softmax's tile: log-sum-exps forward, the scores' gradient backward.

    N dL/dx_ij = a_i e^(x_ij - r_i) + b_j e^(x_ij - c_j) - (a_i / k + b_j) [j is one of the k captions of i]

Letters: n rows (images) and m columns (texts) of the tile; r and c the log-sum-exps of rows and columns, a and b their
weights.
"""

import torch
from torch import Tensor

from clipscale.loss.block import Block
from clipscale.loss.tile import TileOps

# A tile's exponentials e^(x - t) share one shift t, as long as every exponent that matters lies within +-MARGIN
# nats. Sums of 1e7 terms of e^60 stay finite in float32, and e^-60 is still a normal number.
MARGIN = 60.0
MIN_SUM = 1e-25  # somewhat above e^-60: a smaller sum may have lost terms to underflow


class SoftmaxTileOps(TileOps):
    """The softmax's two functions on a tile. They leave out the direction of a side that has no weights."""

    def forward(self, scores: Tensor, tile: Block, bound: float, scratch: Tensor) -> None:
        directions = softmax_directions(tile)
        shift = _exponent_shift(bound)
        i, j = tile.positive_pairs()
        if tile.rows.row_loss is not None:
            tile.rows.row_loss.index_put_((i,), -positive_weights(tile, i, j) * scores[i, j], accumulate=True)
        if shift == 0:
            exponentials = torch.exp(scores, out=scratch)
        else:
            exponentials = torch.sub(scores, shift, out=scratch).exp_()
        for _, lse, dim in directions:
            total = exponentials.sum(dim)
            has_lost_terms = shift > 0 and bool(total.min() < MIN_SUM)
            if has_lost_terms:
                tile_lse = _logsumexp(scores, dim)
            else:
                tile_lse = total.double().log_().add_(shift)
            lse.copy_(torch.logaddexp(lse, tile_lse))

    def backward(self, scores: Tensor, tile: Block, bound: float, scratch: Tensor) -> Tensor:
        directions = softmax_directions(tile)
        shift = _exponent_shift(bound)
        # One exponential an element suffices where e^(t - r) and e^(t - c) are finite, and terms that underflow in
        # e^(x - t) are negligible.
        if all(shift - float(lse.min()) <= MARGIN for _, lse, _ in directions):
            if shift != 0:
                scores.sub_(shift)
            scores.exp_()
            factors = [
                (weight * (shift - lse).exp()).to(scores.dtype).unsqueeze(dim) for weight, lse, dim in directions
            ]
            if len(factors) == 2:
                scores.mul_(torch.add(*factors, out=scratch))
            else:
                scores.mul_(factors[0])
        else:
            terms = [weighted_probabilities(scores, *direction) for direction in directions]
            if len(terms) == 2:
                torch.add(*terms, out=scores)
            else:
                scores.copy_(terms[0])
        # The positives' weights are subtracted from the scores' gradient. In the features' gradients `a p - a` would
        # lose all digits to cancellation near p = 1.
        i, j = tile.positive_pairs()
        scores[i, j] -= positive_weights(tile, i, j).to(scores.dtype)
        return scores


def softmax_directions(block: Block) -> list[tuple[Tensor, Tensor, int]]:
    """The directions of the softmax, image to text and text to image, whose sides have weights.

    For each: the weights, the log-sum-exps, and the dimension of the scores to sum over.
    """
    return [
        (side.lse_weight, side.lse, dim)
        for side, dim in ((block.rows, 1), (block.cols, 0))
        if side.lse_weight is not None and side.lse is not None
    ]


def positive_weights(block: Block, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
    """The weights of the positives at these rows and columns, pair by pair, summed over both directions, float64. A
    row's weight is divided among its captions."""
    weights = []
    if block.rows.lse_weight is not None:
        weights.append(block.rows.lse_weight[rows].double() / block.positive_layout.captions_per_image)
    if block.cols.lse_weight is not None:
        weights.append(block.cols.lse_weight[cols].double())
    return sum(weights[1:], weights[0])


def _exponent_shift(bound: float) -> float:
    """t, given a bound of |x|: e^(x - t) never overflows. t is 0, which costs nothing, for a small bound."""
    return max(0.0, bound - MARGIN)


def _logsumexp(x: Tensor, dim: int) -> Tensor:
    """The float64 log-sum-exp over `dim`, with a shift for each row (column)."""
    largest = x.amax(dim, keepdim=True).clamp_min_(torch.finfo(x.dtype).min)
    return (x - largest).exp_().sum(dim).double().log_().add_(largest.squeeze(dim))


def weighted_probabilities(x: Tensor, weight: Tensor, lse: Tensor, dim: int) -> Tensor:
    """weight * e^(x - lse). The weight corrects what the log-sum-exp loses when it is rounded to the type of x."""
    rounded = lse.to(x.dtype)
    corrected = (weight * (rounded - lse).exp()).to(x.dtype)
    return (x - rounded.unsqueeze(dim)).exp_().mul_(corrected.unsqueeze(dim))
