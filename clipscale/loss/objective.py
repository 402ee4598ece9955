"""The objectives, as what they do with one tile of scores: merge it into the sums, turn it into its own gradient.

Letters: n rows (images), m columns (texts) of the tile; N, M of the whole score matrix. x are scores scale * similarity, r and c the
row and column log-sum-exps, a and b the row and column weights. Scores come as a list: one (n, m) tensor that serves both directions,
or two (image to text, text to image) where the similarity is not the same both ways. All functions may overwrite the scores.
Values and gradients leave out the common factor 1/N, which keeps weights near one in any precision.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clipscale.loss.block import Block, Side

# exp(x - t) is taken with one reference t for the whole tile as long as no exponent that matters leaves +-MARGIN nats: sums of 1e7
# terms of e^60 stay finite in float32, and e^-60 is still a normal number.
MARGIN = 60.0
SMALLEST_SUM = 1e-25  # just above e^-60: a smaller sum may have lost its terms to underflow


def reference_of(bound: float) -> float:
    """The tile's reference t, given a bound on |x|: exp(x - t) never overflows, and t = 0 is exact and free wherever it can be."""
    return max(0.0, bound - MARGIN)


@dataclass(frozen=True)
class Softmax:
    """Cross-entropy of the positive against the row, the column, or both (CLIP; Radford et al. 2021, arXiv 2103.00020).

        L = sum_i a_i (r_i - x_ii) + sum_j b_j (c_j - x_jj),   dL/dx_ij = a_i e^(x_ij - r_i) + b_j e^(x_ij - c_j) - (a_i + b_i) [i = j]

    With label smoothing e the positive's share is 1 - e, and e spreads evenly over all M columns (N rows), as in torch's cross_entropy.
    A side whose weight is None takes no part.
    """

    smoothing: float = 0.0
    total_rows: int = 1
    total_cols: int = 1

    def merge(self, scores: list[Tensor], tile: Block, bound: float, spare: Tensor) -> None:
        """Merge a tile into the running log-sum-exps and targets. `spare` is a scratch tensor of the scores' shape."""
        reference = reference_of(bound)
        for x, rows, cols in _directions(scores, tile):
            if rows is None and cols is None:
                continue
            self._add_targets(x, rows, cols, tile)
            exponentials = torch.sub(x, reference, out=spare).exp_() if reference else torch.exp(x, out=spare)
            for side, dim in ((rows, 1), (cols, 0)):
                if side is not None:
                    total = exponentials.sum(dim)
                    underflow = reference > 0 and bool(total.min() < SMALLEST_SUM)
                    lse = _logsumexp(x, dim) if underflow else total.double().log_().add_(reference)
                    assert side.lse is not None
                    side.lse.copy_(torch.logaddexp(side.lse, lse))

    def gradient(self, scores: list[Tensor], tile: Block, bound: float, spare: Tensor) -> list[Tensor]:
        """The scores replaced, in place, by the derivative of the loss with respect to them."""
        reference = reference_of(bound)
        for x, rows, cols in _directions(scores, tile):
            if rows is None and cols is None:
                x.zero_()
                continue
            sides = [(side, shape) for side, shape in ((rows, (-1, 1)), (cols, (1, -1))) if side is not None]
            lowest = min(float(side.lse.min()) for side, _ in sides if side.lse is not None)
            if reference - lowest <= MARGIN:  # one exponential an element: e^(x - t) (a e^(t - r) + b e^(t - c))
                # (lse is float64: rounded to float32 at scale 100 it would be off by 4e-6, and with it every probability)
                factors = [(side.weight * (reference - side.lse).exp()).to(x.dtype).view(shape) for side, shape in sides]
                (x.sub_(reference) if reference else x).exp_()
                x.mul_(torch.add(*factors, out=spare) if len(factors) == 2 else factors[0])
            else:
                terms = [_weighted_probabilities(x, side, shape) for side, shape in sides]
                torch.add(*terms, out=x) if len(terms) == 2 else x.copy_(terms[0])
            self._subtract_targets(x, rows, cols, tile)
        return scores

    def _add_targets(self, x: Tensor, rows: Side | None, cols: Side | None, tile: Block) -> None:
        target = tile.rows.target
        assert target is not None
        diagonal = tile.diagonal()
        if diagonal is not None:
            i, j = diagonal
            target[i] += (1 - self.smoothing) * _weight_sum(rows, cols, i, j) * x.diagonal(tile.positive).double()
        if self.smoothing:
            if rows is not None:
                target += rows.weight * x.sum(1) * (self.smoothing / self.total_cols)
            if cols is not None:
                target += x @ cols.weight * (self.smoothing / self.total_rows)

    def _subtract_targets(self, g: Tensor, rows: Side | None, cols: Side | None, tile: Block) -> None:
        # Inside the tile, not as a correction afterwards: a p - a cancels to nothing where the positive has all the mass.
        diagonal = tile.diagonal()
        if diagonal is not None:
            g.diagonal(tile.positive).sub_((1 - self.smoothing) * _weight_sum(rows, cols, *diagonal))
        if self.smoothing:
            if rows is not None:
                g.sub_((rows.weight * (self.smoothing / self.total_cols))[:, None])
            if cols is not None:
                g.sub_((cols.weight * (self.smoothing / self.total_rows))[None, :])


@dataclass(frozen=True)
class Sigmoid:
    """Every pair a yes-or-no question (SigLIP; Zhai et al. 2023, arXiv 2303.15343): L = sum_ij softplus(-z_ij (x_ij + bias)).

    z is +1 at the positives and -1 elsewhere; dL/dx_ij = sigmoid(x_ij + bias) - [i = j]. There is no log-sum-exp: the value is
    collected, negated, in the rows' targets. Where the similarity differs between the directions, x is their mean.
    """

    def merge(self, scores: list[Tensor], tile: Block, bound: float, spare: Tensor) -> None:
        logits = self._logits(scores, tile)
        torch._C._nn.softplus(logits, 1.0, 50.0, out=spare)
        assert tile.rows.target is not None
        tile.rows.target.sub_(spare.sum(1))

    def gradient(self, scores: list[Tensor], tile: Block, bound: float, spare: Tensor) -> list[Tensor]:
        g = self._logits(scores, tile).sigmoid_()
        if tile.positive is not None:
            g.diagonal(tile.positive).neg_()  # sigmoid(y) - 1 = -sigmoid(-y), without the cancellation
        if tile.shared.bias_grad is not None:
            tile.shared.bias_grad += g.sum()
        return [g.div_(len(scores))] * len(scores) if len(scores) > 1 else [g]

    def _logits(self, scores: list[Tensor], tile: Block) -> Tensor:
        x = scores[0] if len(scores) == 1 else scores[0].add_(scores[1]).div_(2)
        x.add_(tile.shared.bias)
        if tile.positive is not None:
            x.diagonal(tile.positive).neg_()
        return x


Objective = Softmax | Sigmoid


def _directions(scores: list[Tensor], tile: Block) -> list[tuple[Tensor, Side | None, Side | None]]:
    rows = tile.rows if tile.rows.weight is not None else None
    cols = tile.cols if tile.cols.weight is not None else None
    return [(scores[0], rows, cols)] if len(scores) == 1 else [(scores[0], rows, None), (scores[1], None, cols)]


def _logsumexp(x: Tensor, dim: int) -> Tensor:
    """The float64 log-sum-exp over `dim`, with a reference for each row (column)."""
    largest = x.amax(dim, keepdim=True).clamp_min_(torch.finfo(x.dtype).min)
    return (x - largest).exp_().sum(dim).double().log_().add_(largest.squeeze(dim))


def _weighted_probabilities(x: Tensor, side: Side, shape: tuple[int, int]) -> Tensor:
    """weight * e^(x - lse). What the log-sum-exp loses in the precision of x is made up for in the weight."""
    assert side.lse is not None and side.weight is not None
    lse = side.lse.to(x.dtype)
    weight = (side.weight * (lse - side.lse).exp()).to(x.dtype)
    return (x - lse.view(shape)).exp_().mul_(weight.view(shape))


def _weight_sum(rows: Side | None, cols: Side | None, i: slice, j: slice) -> Tensor:
    """a_i + b_j along the positives; a side that takes no part adds nothing."""
    weights = [side.weight[where] for side, where in ((rows, i), (cols, j)) if side is not None and side.weight is not None]
    return sum(weights[1:], weights[0])
