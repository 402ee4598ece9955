"""The objectives, as what they do with one tile of scores: merge it into the sums, or turn it into its own gradient.

Letters: n rows (images) and m columns (texts) of the tile; N and M of the whole score matrix. x are scores, scale * similarity; r and c
the log-sum-exps of rows and columns, a and b their weights. Scores come as a list: one (n, m) tensor that serves both directions, or
two (image to text, text to image) where the similarity is another one each way. They may be overwritten. Values and gradients leave out
the common factor 1/N, which keeps the weights near one in any precision.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clipscale.loss.block import Block, Side

# e^(x - t) is taken with one reference t for a whole tile as long as no exponent that matters leaves +-MARGIN nats: sums of 1e7 terms
# of e^60 stay finite in float32, and e^-60 is still a normal number.
MARGIN = 60.0
SMALLEST_SUM = 1e-25  # somewhat above e^-60: a smaller sum may have lost terms to underflow


@dataclass(frozen=True)
class Softmax:
    """Cross-entropy of the positive against its row, its column, or both (CLIP; Radford et al. 2021, arXiv 2103.00020).

        L = sum_i a_i (r_i - x_ii) + sum_j b_j (c_j - x_jj),   dL/dx_ij = a_i e^(x_ij - r_i) + b_j e^(x_ij - c_j) - (a_i + b_i) [i = j]

    With label smoothing e the positive's share of the target is 1 - e, and e spreads evenly over all M columns (N rows), as in torch's
    cross_entropy. A side without weights takes no part.
    """

    smoothing: float = 0.0
    total_rows: int = 1
    total_cols: int = 1

    def merge(self, scores: list[Tensor], tile: Block, bound: float, spare: Tensor) -> None:
        """Merge a tile into the running log-sum-exps and targets. `bound` limits |x|; `spare` is scratch of the scores' shape."""
        reference = _reference(bound)
        for x, directions in self._directions(scores, tile):
            if not directions:
                continue
            self._add_targets(x, directions, tile, spare)
            exponentials = torch.sub(x, reference, out=spare).exp_() if reference else torch.exp(x, out=spare)
            for side in directions:
                total = exponentials.sum(side.dim)
                underflow = reference > 0 and bool(total.min() < SMALLEST_SUM)
                lse = _logsumexp(x, side.dim) if underflow else total.double().log_().add_(reference)
                side.lse.copy_(torch.logaddexp(side.lse, lse))

    def gradient(self, scores: list[Tensor], tile: Block, bound: float, spare: Tensor) -> list[Tensor]:
        """The scores replaced, in place, by the derivative of the loss with respect to them."""
        reference = _reference(bound)
        for x, directions in self._directions(scores, tile):
            if not directions:
                x.zero_()
                continue
            if all(reference - float(side.lse.min()) <= MARGIN for side in directions):
                # One exponential an element: e^(x - t) (a e^(t - r) + b e^(t - c)).
                factors = [side.across((side.weight * (reference - side.lse).exp()).to(x.dtype)) for side in directions]
                (x.sub_(reference) if reference else x).exp_()
                x.mul_(torch.add(*factors, out=spare) if len(factors) == 2 else factors[0])
            else:
                terms = [_weighted_probabilities(x, side) for side in directions]
                torch.add(*terms, out=x) if len(terms) == 2 else x.copy_(terms[0])
            self._subtract_targets(x, directions, tile)
        return scores

    def _directions(self, scores: list[Tensor], tile: Block) -> list[tuple[Tensor, list["Direction"]]]:
        """Each score tensor with the sides whose softmax it serves."""
        rows = [] if tile.rows.weight is None else [Direction(tile.rows, 1, self.smoothing / self.total_cols)]
        cols = [] if tile.cols.weight is None else [Direction(tile.cols, 0, self.smoothing / self.total_rows)]
        return [(scores[0], rows + cols)] if len(scores) == 1 else [(scores[0], rows), (scores[1], cols)]

    def _add_targets(self, x: Tensor, directions: list["Direction"], tile: Block, spare: Tensor) -> None:
        target, diagonal = tile.rows.target, tile.diagonal()
        assert target is not None
        if diagonal is not None:
            weight = sum(side.weight[diagonal[1 - side.dim]].double() for side in directions) * (1 - self.smoothing)
            target[diagonal[0]] += weight * x.diagonal(tile.offset)
        if self.smoothing:
            for side in directions:
                target += torch.mul(x, side.across(side.weight * side.smoothing), out=spare).sum(1)

    def _subtract_targets(self, g: Tensor, directions: list["Direction"], tile: Block) -> None:
        # Inside the tile, not as a correction afterwards: a p - a cancels to nothing where the positive has all the mass.
        diagonal = tile.diagonal()
        if diagonal is not None:
            weight = sum(side.weight[diagonal[1 - side.dim]] for side in directions) * (1 - self.smoothing)
            g.diagonal(tile.offset).sub_(weight)
        if self.smoothing:
            for side in directions:
                g.sub_(side.across(side.weight * side.smoothing))


@dataclass(frozen=True)
class Sigmoid:
    """Every pair a yes-or-no question (SigLIP; Zhai et al. 2023, arXiv 2303.15343): L = sum_ij softplus(-z_ij (x_ij + bias)).

    z is +1 at the positives and -1 elsewhere; dL/dx_ij = sigmoid(x_ij + bias) - [i = j]. There is no log-sum-exp: the value is
    collected, negated, in the rows' targets. Where the similarity differs between the directions, x is their mean.
    """

    def merge(self, scores: list[Tensor], tile: Block, bound: float, spare: Tensor) -> None:
        """Take a tile's part of the value off the rows' targets."""
        logits = self._signed_logits(scores, tile)
        assert tile.rows.target is not None
        tile.rows.target -= torch.logaddexp(logits, logits.new_zeros(()), out=spare).sum(1)

    def gradient(self, scores: list[Tensor], tile: Block, bound: float, spare: Tensor) -> list[Tensor]:
        """The scores replaced, in place, by the derivative of the loss with respect to them; the bias' gradient is added up."""
        g = self._signed_logits(scores, tile).sigmoid_()
        if tile.diagonal() is not None:
            g.diagonal(tile.offset).neg_()  # sigmoid(y) - 1 is -sigmoid(-y), without the cancellation
        if tile.shared.bias_grad is not None:
            tile.shared.bias_grad += g.sum()
        return [g] if len(scores) == 1 else [g.div_(2)] * 2

    def _signed_logits(self, scores: list[Tensor], tile: Block) -> Tensor:
        """-z (x + bias)"""
        logits = scores[0] if len(scores) == 1 else scores[0].add_(scores[1]).div_(2)
        logits.add_(tile.shared.bias)
        if tile.diagonal() is not None:
            logits.diagonal(tile.offset).neg_()
        return logits


Objective = Softmax | Sigmoid


class Direction:
    """One side's part in a softmax: the dimension summed over, and each candidate's share of the smoothed target."""

    def __init__(self, side: Side, dim: int, smoothing: float) -> None:
        assert side.weight is not None and side.lse is not None
        self.weight, self.lse, self.dim, self.smoothing = side.weight, side.lse, dim, smoothing

    def across(self, x: Tensor) -> Tensor:
        """One number a row (column), shaped to be spread over the columns (rows)."""
        return x.unsqueeze(self.dim)


def _reference(bound: float) -> float:
    """t, given a bound on |x|: e^(x - t) never overflows; and t = 0 costs nothing, loses nothing, and is chosen wherever it can be."""
    return max(0.0, bound - MARGIN)


def _logsumexp(x: Tensor, dim: int) -> Tensor:
    """The float64 log-sum-exp over `dim`, with a reference for each row (column)."""
    largest = x.amax(dim, keepdim=True).clamp_min_(torch.finfo(x.dtype).min)
    return (x - largest).exp_().sum(dim).double().log_().add_(largest.squeeze(dim))


def _weighted_probabilities(x: Tensor, side: Direction) -> Tensor:
    """weight * e^(x - lse). What the log-sum-exp loses when rounded to the precision of x is made up for in the weight."""
    lse = side.lse.to(x.dtype)
    weight = (side.weight * (lse - side.lse).exp()).to(x.dtype)
    return (x - side.across(lse)).exp_().mul_(side.across(weight))
