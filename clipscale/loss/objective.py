"""The objectives: one tile of scores forward into the running sums, and backward into the scores' gradient.

Scores x (n, m) are scale * similarity. Both functions may overwrite them. Values and gradients leave out the common
factor 1/N, which keeps the weights near one in any precision.

Letters: n rows (images) and m columns (texts) of the tile; r and c the log-sum-exps of rows and columns, a and b their
weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clipscale.loss.block import Block, RowBlock
from clipscale.loss.similarity import product

# e^(x - t) takes one reference t for a whole tile while no exponent that matters leaves +-MARGIN nats: sums of 1e7
# terms of e^60 stay finite in float32, and e^-60 is still a normal number.
MARGIN = 60.0
SMALLEST_SUM = 1e-25  # somewhat above e^-60: a smaller sum may have lost terms to underflow


class Softmax:
    """Cross-entropy of the positive against its row, its column, or both (CLIP; Radford et al. 2021, arXiv 2103.00020).

        L        = sum_i a_i (r_i - x_ii) + sum_j b_j (c_j - x_jj)
        dL/dx_ij = a_i e^(x_ij - r_i) + b_j e^(x_ij - c_j) - (a_i + b_i) [i = j]

    A side without weights takes no part.
    """

    sums_pairs, other_lses = False, 0

    def forward(self, scores: Tensor, tile: Block, bound: float, spare: Tensor) -> None:
        """Merge a tile into the log-sum-exps and targets. `bound` limits |x|; `spare`: scratch of the scores' shape."""
        x, directions, reference, diagonal = scores, self.directions(tile), _reference(bound), tile.diagonal()
        if diagonal is not None:
            self.add_positives(x.diagonal(tile.offset), directions, tile, diagonal)
        exponentials = torch.sub(x, reference, out=spare).exp_() if reference else torch.exp(x, out=spare)
        for side in directions:
            total = exponentials.sum(side.dim)
            underflow = reference > 0 and bool(total.min() < SMALLEST_SUM)
            lse = _logsumexp(x, side.dim) if underflow else total.double().log_().add_(reference)
            side.lse.copy_(torch.logaddexp(side.lse, lse))

    def backward(self, scores: Tensor, tile: Block, bound: float, spare: Tensor) -> Tensor:
        """Replace the scores, in place, by the derivative of the loss with respect to them."""
        x, directions, reference, diagonal = scores, self.directions(tile), _reference(bound), tile.diagonal()
        if _is_near(reference, directions):  # one exponential an element
            (x.sub_(reference) if reference else x).exp_()
            factors = [side.across((side.weight * (reference - side.lse).exp()).to(x.dtype)) for side in directions]
            x.mul_(torch.add(*factors, out=spare) if len(factors) == 2 else factors[0])
        else:
            terms = [_weighted_probabilities(x, side) for side in directions]
            torch.add(*terms, out=x) if len(terms) == 2 else x.copy_(terms[0])
        # In the tile, not as a correction afterwards: a p - a cancels to nothing where the positive has all the mass.
        if diagonal is not None:
            x.diagonal(tile.offset).sub_(sum(side.weight[diagonal[1 - side.dim]] for side in directions))
        return x

    def add_positives(
        self, scores: Tensor, directions: list["Direction"], block: Block, diagonal: tuple[slice, slice]
    ) -> None:
        """Add what the softmax subtracts from the log-sum-exps to the rows' targets: the positives' scores."""
        assert block.rows.target is not None
        weight = sum(side.weight[diagonal[1 - side.dim]].double() for side in directions)
        block.rows.target[diagonal[0]] += weight * scores

    def directions(self, block: Block) -> list["Direction"]:
        """Image to text and text to image, where their side has weights."""
        sides = (block.rows, 1), (block.cols, 0)
        return [Direction(side, dim) for side, dim in sides if side.weight is not None]


class Sigmoid:
    """Every pair is a binary question (SigLIP; Zhai et al. 2023, arXiv 2303.15343).

    L = sum_ij softplus(-z_ij (x_ij + bias)), where z is +1 at the positives and -1 elsewhere, so dL/dx_ij =
    sigmoid(x_ij + bias) - [i = j]. There is no log-sum-exp: the rows' targets collect the value, negated.
    """

    sums_pairs, other_lses = True, 0

    def forward(self, scores: Tensor, tile: Block, bound: float, spare: Tensor) -> None:
        """Subtract a tile's part of the value from the rows' targets."""
        self._subtract_value(self._signed_logits(scores, tile), tile, spare)

    def backward(self, scores: Tensor, tile: Block, bound: float, spare: Tensor) -> Tensor:
        """Replace the scores, in place, by the loss's derivative in them, and add to the bias's gradient.

        Also subtract the tile's part of the value from the targets, where there are any.
        """
        logits = self._signed_logits(scores, tile)
        if tile.rows.target is not None:
            self._subtract_value(logits, tile, spare)
        g = logits.sigmoid_()
        if tile.diagonal() is not None:
            g.diagonal(tile.offset).neg_()  # sigmoid(y) - 1 is -sigmoid(-y), without the cancellation
        if tile.parameters.bias_grad is not None:
            tile.parameters.bias_grad += g.sum()
        return g

    def _subtract_value(self, logits: Tensor, tile: Block, spare: Tensor) -> None:
        assert tile.rows.target is not None
        tile.rows.target -= torch.logaddexp(logits, logits.new_zeros(()), out=spare).sum(1)

    def _signed_logits(self, scores: Tensor, tile: Block) -> Tensor:
        """-z (x + bias)"""
        logits = scores.add_(tile.parameters.bias)
        if tile.diagonal() is not None:
            logits.diagonal(tile.offset).neg_()
        return logits


class Distillation(Softmax):
    """Cross-entropy to the mean of K teachers' probabilities (Vasu et al. 2023, arXiv 2311.17049; open_clip's
    DistillClipLoss), where a teacher's scores are y = t <teacher's image i, teacher's text j>.

        L        = sum_i a_i (r_i - sum_j P_ij x_ij) + sum_j b_j (c_j - sum_i Q_ij x_ij)
        dL/dx_ij = a_i (e^(x_ij - r_i) - P_ij) + b_j (e^(x_ij - c_j) - Q_ij)

    P are the means of the softmax of y over rows, Q over columns. `forward` collects the students' and the teachers'
    log-sum-exps; `backward` needs both and finds the value, too.
    """

    sums_pairs = True

    def __init__(self, teachers: Sequence[tuple[int, float]]) -> None:
        """teachers: the feature width and the logit scale of each."""
        self.teachers, self.other_lses = teachers, len(teachers)

    def forward(self, scores: Tensor, tile: Block, bound: float, spare: Tensor) -> None:
        super().forward(scores, replace(tile, positive=None), bound, spare)
        for y, y_tile, y_bound in self._teachers(tile, scores):
            super().forward(y, y_tile, y_bound, spare)

    def backward(self, scores: Tensor, tile: Block, bound: float, spare: Tensor) -> Tensor:
        wanted = torch.zeros_like(scores)
        for y, y_tile, y_bound in self._teachers(tile, scores):
            wanted += super().backward(y, y_tile, y_bound, spare)
        if tile.rows.target is not None:
            tile.rows.target += (wanted * scores).sum(1)
        return super().backward(scores, replace(tile, positive=None), bound, spare).sub_(wanted)

    def _teachers(self, tile: Block, like: Tensor) -> Iterator[tuple[Tensor, Block, float]]:
        """Each teacher's scores (n, m), the tile as it sees it, without positives, and a bound of |scores|."""
        start = 0
        for number, (width, scale) in enumerate(self.teachers):
            sides, features = [], []
            for side in (tile.rows, tile.cols):
                assert side.teachers is not None
                features.append(side.teachers[:, start : start + width])
                weight = None if side.weight is None else side.weight / len(self.teachers)
                lse = None if side.others is None else side.others[:, number]
                sides.append(replace(side, lse=lse, weight=weight))
            y = product(features[0], features[1].T, torch.empty_like(like), scale)
            yield y, Block(sides[0], sides[1], tile.parameters, None), float(y.abs().max())
            start += width


Objective = Softmax | Sigmoid | Distillation


class Direction:
    """One side of a softmax, and the dimension that it sums over."""

    def __init__(self, side: RowBlock, dim: int) -> None:
        assert side.weight is not None and side.lse is not None
        self.weight, self.lse, self.dim = side.weight, side.lse, dim

    def across(self, x: Tensor) -> Tensor:
        """One number a row (column), shaped to broadcast over the columns (rows)."""
        return x.unsqueeze(self.dim)


def _reference(bound: float) -> float:
    """t, given a bound of |x|: e^(x - t) never overflows. t = 0 costs and loses nothing, and is chosen where it can."""
    return max(0.0, bound - MARGIN)


def _is_near(reference: float, directions: list[Direction]) -> bool:
    """Whether e^(t - r) and e^(t - c) are finite, and what underflows in e^(x - t) is nothing beside them."""
    return all(reference - float(side.lse.min()) <= MARGIN for side in directions)


def _logsumexp(x: Tensor, dim: int) -> Tensor:
    """The float64 log-sum-exp over `dim`, with a reference for each row (column)."""
    largest = x.amax(dim, keepdim=True).clamp_min_(torch.finfo(x.dtype).min)
    return (x - largest).exp_().sum(dim).double().log_().add_(largest.squeeze(dim))


def _weighted_probabilities(x: Tensor, side: Direction) -> Tensor:
    """weight * e^(x - lse). The weight corrects what the log-sum-exp loses when it is rounded to the type of x."""
    lse = side.lse.to(x.dtype)
    weight = (side.weight * (lse - side.lse).exp()).to(x.dtype)
    return (x - side.across(lse)).exp_().mul_(side.across(weight))
