"""The objectives: what each does with one tile of scores, forward into the running sums and backward into the scores' gradient.

Scores x are scale * similarity. They are a list: one tensor (n, m) for both directions, or two (image to text, text to image) where
the similarity differs. Both functions may overwrite them. Values and gradients leave out the common factor 1/N, which keeps the weights
near one in any precision.

Letters: n rows (images) and m columns (texts) of the tile; N and M of the whole score matrix; r and c the log-sum-exps of rows and
columns, a and b their weights.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clipscale.loss.block import Block, RowBlock

# e^(x - t) takes one reference t for a whole tile while no exponent that matters leaves +-MARGIN nats: sums of 1e7 terms of e^60 stay
# finite in float32, and e^-60 is still a normal number.
MARGIN = 60.0
SMALLEST_SUM = 1e-25  # somewhat above e^-60: a smaller sum may have lost terms to underflow


@dataclass(frozen=True)
class Softmax:
    """Cross-entropy of the positive against its row, its column, or both (CLIP; Radford et al. 2021, arXiv 2103.00020).

        L = sum_i a_i (r_i - x_ii) + sum_j b_j (c_j - x_jj),   dL/dx_ij = a_i e^(x_ij - r_i) + b_j e^(x_ij - c_j) - (a_i + b_i) [i = j]

    With label smoothing e the positive's target is 1 - e, and e is spread evenly over all M columns (N rows), as in torch's
    cross_entropy. A side without weights takes no part.
    """

    smoothing: float = 0.0
    total_rows: int = 1
    total_cols: int = 1

    def forward(self, scores: list[Tensor], tile: Block, bound: float, spare: Tensor) -> tuple[Tensor, float] | None:
        """Merge a tile into the running log-sum-exps and targets. `bound` limits |x|; `spare` is scratch of the scores' shape.

        Returns e^(x - t), and t, where one tensor of scores has them for all its directions.
        """
        assert tile.rows.target is not None
        reference, found = _reference(bound), None
        for x, directions in self._served(scores, tile):
            if not directions:
                continue
            diagonal = tile.diagonal()
            if diagonal is not None:
                self.add_positives(x.diagonal(tile.offset), directions, tile, diagonal)
            for side in directions if self.smoothing else []:
                tile.rows.target += torch.mul(x, side.across(side.weight * side.smoothing), out=spare).sum(1)
            exponentials = torch.sub(x, reference, out=spare).exp_() if reference else torch.exp(x, out=spare)
            found = (exponentials, reference) if len(scores) == 1 else None
            for side in directions:
                total = exponentials.sum(side.dim)
                underflow = reference > 0 and bool(total.min() < SMALLEST_SUM)
                lse = _logsumexp(x, side.dim) if underflow else total.double().log_().add_(reference)
                side.lse.copy_(torch.logaddexp(side.lse, lse))
        return found

    def backward_from(self, e: Tensor, reference: float, tile: Block, spare: Tensor) -> list[Tensor] | None:
        """`backward` from e^(x - t) instead of scores, in place. None, with e as it was, where t does not suit the log-sum-exps."""
        directions = self.directions(tile)
        if not _is_near(reference, directions):
            return None
        self._weigh(e, reference, directions, spare)
        self._subtract_targets(e, directions, tile)
        return [e]

    def backward(self, scores: list[Tensor], tile: Block, bound: float, spare: Tensor) -> list[Tensor]:
        """Replace the scores, in place, by the derivative of the loss with respect to them."""
        reference = _reference(bound)
        for x, directions in self._served(scores, tile):
            if not directions:
                x.zero_()
                continue
            if _is_near(reference, directions):  # one exponential an element
                (x.sub_(reference) if reference else x).exp_()
                self._weigh(x, reference, directions, spare)
            else:
                terms = [_weighted_probabilities(x, side) for side in directions]
                torch.add(*terms, out=x) if len(terms) == 2 else x.copy_(terms[0])
            self._subtract_targets(x, directions, tile)
        return scores

    def _weigh(self, e: Tensor, reference: float, directions: list["Direction"], spare: Tensor) -> None:
        """e = e^(x - t) becomes a e^(x - r) + b e^(x - c), in place."""
        factors = [side.across((side.weight * (reference - side.lse).exp()).to(e.dtype)) for side in directions]
        e.mul_(torch.add(*factors, out=spare) if len(factors) == 2 else factors[0])

    def add_positives(
        self, scores: Tensor, directions: list["Direction"], block: Block, diagonal: tuple[slice, slice]
    ) -> None:
        """Add what the softmax subtracts from the log-sum-exps to the rows' targets: the positives' scores, without those of smoothing."""
        assert block.rows.target is not None
        weight = sum(side.weight[diagonal[1 - side.dim]].double() for side in directions) * (1 - self.smoothing)
        block.rows.target[diagonal[0]] += weight * scores

    def _subtract_targets(self, g: Tensor, directions: list["Direction"], tile: Block) -> None:
        # Inside the tile, not as a correction afterwards: a p - a cancels to nothing where the positive has all the mass.
        diagonal = tile.diagonal()
        if diagonal is not None:
            weight = sum(side.weight[diagonal[1 - side.dim]] for side in directions) * (1 - self.smoothing)
            g.diagonal(tile.offset).sub_(weight)
        if self.smoothing:
            for side in directions:
                g.sub_(side.across(side.weight * side.smoothing))

    def directions(self, block: Block) -> list["Direction"]:
        """Image to text and text to image, where their side has weights."""
        sides = (block.rows, 1, self.total_cols), (block.cols, 0, self.total_rows)
        return [Direction(side, dim, self.smoothing / count) for side, dim, count in sides if side.weight is not None]

    def _served(self, scores: list[Tensor], tile: Block) -> list[tuple[Tensor, list["Direction"]]]:
        """Each score tensor with the directions that it serves."""
        found = self.directions(tile)
        if len(scores) == 1:
            return [(scores[0], found)]
        return [(x, [side for side in found if side.dim == dim]) for x, dim in zip(scores, (1, 0))]


@dataclass(frozen=True)
class Sigmoid:
    """Every pair is a binary question (SigLIP; Zhai et al. 2023, arXiv 2303.15343): L = sum_ij softplus(-z_ij (x_ij + bias)).

    z is +1 at the positives and -1 elsewhere; dL/dx_ij = sigmoid(x_ij + bias) - [i = j]. There is no log-sum-exp: the rows' targets
    collect the value, negated. Where the similarity differs between the directions, x is their mean.
    """

    def forward(self, scores: list[Tensor], tile: Block, bound: float, spare: Tensor) -> None:
        """Subtract a tile's part of the value from the rows' targets."""
        self._subtract_value(self._signed_logits(scores, tile), tile, spare)

    def backward(self, scores: list[Tensor], tile: Block, bound: float, spare: Tensor) -> list[Tensor]:
        """Replace the scores, in place, by the derivative of the loss with respect to them, and add to the bias's gradient."""
        return self._derivative(self._signed_logits(scores, tile), scores, tile)

    def forward_backward(self, scores: list[Tensor], tile: Block, bound: float, spare: Tensor) -> list[Tensor]:
        """Both."""
        logits = self._signed_logits(scores, tile)
        self._subtract_value(logits, tile, spare)
        return self._derivative(logits, scores, tile)

    def _subtract_value(self, logits: Tensor, tile: Block, spare: Tensor) -> None:
        assert tile.rows.target is not None
        tile.rows.target -= torch.logaddexp(logits, logits.new_zeros(()), out=spare).sum(1)

    def _derivative(self, logits: Tensor, scores: list[Tensor], tile: Block) -> list[Tensor]:
        g = logits.sigmoid_()
        if tile.diagonal() is not None:
            g.diagonal(tile.offset).neg_()  # sigmoid(y) - 1 is -sigmoid(-y), without the cancellation
        if tile.parameters.bias_grad is not None:
            tile.parameters.bias_grad += g.sum()
        return [g] if len(scores) == 1 else [g.div_(2)] * 2

    def _signed_logits(self, scores: list[Tensor], tile: Block) -> Tensor:
        """-z (x + bias)"""
        logits = scores[0] if len(scores) == 1 else scores[0].add_(scores[1]).div_(2)
        logits.add_(tile.parameters.bias)
        if tile.diagonal() is not None:
            logits.diagonal(tile.offset).neg_()
        return logits


Objective = Softmax | Sigmoid


class Direction:
    """One side of a softmax: the dimension it sums over, and the target that smoothing gives to each candidate."""

    def __init__(self, side: RowBlock, dim: int, smoothing: float) -> None:
        assert side.weight is not None and side.lse is not None
        self.weight, self.lse, self.dim, self.smoothing = side.weight, side.lse, dim, smoothing

    def across(self, x: Tensor) -> Tensor:
        """One number a row (column), shaped to broadcast over the columns (rows)."""
        return x.unsqueeze(self.dim)


def _reference(bound: float) -> float:
    """t, given a bound of |x|: e^(x - t) never overflows. t = 0 costs nothing and loses nothing, and is chosen wherever it can be."""
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
