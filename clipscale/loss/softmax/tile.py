"""The softmax's tile: log-sum-exps forward, the scores' gradient backward.

    dL/dx_ij = a_i e^(x_ij - r_i) + b_j e^(x_ij - c_j) - (a_i + b_j) [j belongs to i]

Several positives share the last term: it is s_i + s_j at each pair of equal keys, with the sides' shares s.

Letters: n rows (images) and m columns (texts) of the tile; r and c the log-sum-exps of rows and columns, a and b their
weights.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clipscale.loss.block import Block
from clipscale.loss.tile import ObjectiveTile

# e^(x - t) takes one reference t for a whole tile while no exponent that matters leaves +-MARGIN nats: sums of 1e7
# terms of e^60 stay finite in float32, and e^-60 is still a normal number.
MARGIN = 60.0
SMALLEST_SUM = 1e-25  # somewhat above e^-60: a smaller sum may have lost terms to underflow


class SoftmaxTile(ObjectiveTile):
    """A side without weights takes no part."""

    def forward(self, scores: Tensor, tile: Block, bound: float, spare: Tensor) -> None:
        x = scores
        sides = directions(tile)
        reference = _reference(bound)
        pulled = positives(x, tile)
        if pulled is not None and tile.rows.target is not None:
            rows, own_scores, weights = pulled
            tile.rows.target[rows] += (weights * own_scores).sum(1)
        exponentials = torch.sub(x, reference, out=spare).exp_() if reference else torch.exp(x, out=spare)
        for side in sides:
            total = exponentials.sum(side.dim)
            underflow = reference > 0 and bool(total.min() < SMALLEST_SUM)
            lse = _logsumexp(x, side.dim) if underflow else total.double().log_().add_(reference)
            side.lse.copy_(torch.logaddexp(side.lse, lse))

    def backward(self, scores: Tensor, tile: Block, bound: float, spare: Tensor) -> Tensor:
        x = scores
        sides = directions(tile)
        reference = _reference(bound)
        if _is_near(reference, sides):  # one exponential an element
            if reference:
                x.sub_(reference)
            x.exp_()
            factors = [side.across((side.weight * (reference - side.lse).exp()).to(x.dtype)) for side in sides]
            x.mul_(torch.add(*factors, out=spare) if len(factors) == 2 else factors[0])
        else:
            terms = [_weighted_probabilities(x, side) for side in sides]
            torch.add(*terms, out=x) if len(terms) == 2 else x.copy_(terms[0])
        # In the tile, not as a correction afterwards: a p - a cancels to nothing where the positive has all the mass.
        pulled = positives(x, tile)
        if pulled is not None:
            _, probabilities, weights = pulled
            probabilities.sub_(weights.to(x.dtype))
        return x


@dataclass
class Direction:
    """One side of a softmax, and the dimension that it sums over."""

    weight: Tensor
    lse: Tensor
    dim: int

    def across(self, x: Tensor) -> Tensor:
        """One number a row (column), shaped to broadcast over the columns (rows)."""
        return x.unsqueeze(self.dim)


def directions(block: Block) -> list[Direction]:
    """Image to text and text to image, where their side has weights."""
    sides = []
    for side, dim in ((block.rows, 1), (block.cols, 0)):
        if side.weight is not None and side.lse is not None:
            sides.append(Direction(side.weight, side.lse[:, 0], dim))
    return sides


def positives(x: Tensor, tile: Block) -> tuple[slice, Tensor, Tensor] | None:
    """The rows with positives, their numbers in x (a view) and their weights (float64): on the diagonal (n, 1), or
    (n, m) by the sides' shares. None: the tile has no positives."""
    rows, cols = tile.rows, tile.cols
    if rows.share is not None and cols.share is not None:
        same = tile.same()
        weights = rows.share.double()[:, None] + cols.share.double()[None, :]
        return (slice(None), x, weights.masked_fill_(~same, 0)) if bool(same.any()) else None
    diagonal = tile.diagonal()
    if diagonal is None:
        return None
    return diagonal[0], x.diagonal(tile.offset)[:, None], diagonal_weights(tile, diagonal)[:, None]


def diagonal_weights(block: Block, diagonal: tuple[slice, slice]) -> Tensor:
    """a_i + b_j of the pairs on the diagonal, float64."""
    sides = zip((block.rows, block.cols), diagonal)
    weights = [side.weight[index].double() for side, index in sides if side.weight is not None]
    return sum(weights[1:], weights[0])


def _reference(bound: float) -> float:
    """t, given a bound of |x|: e^(x - t) never overflows. t = 0 costs and loses nothing, and is chosen where it can."""
    return max(0.0, bound - MARGIN)


def _is_near(reference: float, sides: list[Direction]) -> bool:
    """Whether e^(t - r) and e^(t - c) are finite, and what underflows in e^(x - t) is nothing beside them."""
    return all(reference - float(side.lse.min()) <= MARGIN for side in sides)


def _logsumexp(x: Tensor, dim: int) -> Tensor:
    """The float64 log-sum-exp over `dim`, with a reference for each row (column)."""
    largest = x.amax(dim, keepdim=True).clamp_min_(torch.finfo(x.dtype).min)
    return (x - largest).exp_().sum(dim).double().log_().add_(largest.squeeze(dim))


def _weighted_probabilities(x: Tensor, side: Direction) -> Tensor:
    """weight * e^(x - lse). The weight corrects what the log-sum-exp loses when it is rounded to the type of x."""
    lse = side.lse.to(x.dtype)
    weight = (side.weight * (lse - side.lse).exp()).to(x.dtype)
    return (x - side.across(lse)).exp_().mul_(side.across(weight))
