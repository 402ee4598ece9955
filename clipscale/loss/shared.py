"""Pairs that are no negatives: samples that share a key (the same caption or picture), and an image's own captions.

They are few. So a plain backend computes every score, as fast as without keys, and its results are corrected:

- for positives, and under the sigmoid for pairs that are left out, pair by pair (`Corrected`). With P_i and P_j the
  positives of a row and a column, G_ij = a_i e^(x_ij - r_i) + b_j e^(x_ij - c_j) - a_i / |P_i| - b_j / |P_j|;
- for pairs that the softmax leaves out by computing their rows and columns anew, in torch's tiles (`Masked`). (Where a
  double matches better than the pair itself, nearly all of a sum is left out, and a difference of sums is rounding.)

Letters: n rows (images) and m columns (texts) of a block, k pairs or captions, D feature width.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from clipscale.loss.autograd import Backend
from clipscale.loss.block import Block, Parameters, RowBlock, widened
from clipscale.loss.exchange import Communicator
from clipscale.loss.inputs import Inputs
from clipscale.loss.similarity import row_products

MANY = 1 / 4  # of the rows: tiles for all of them cost less than for their columns, too
ELSEWHERE = 2.0**20  # nats: of a log-sum-exp beside which every exponential is 0


def prepared(inputs: Inputs, comm: Communicator | None) -> tuple[Inputs, bool]:
    """The inputs with owners and shares, or without keys where no pair needs them; and whether the pairs are many.

    It gathers the keys of all ranks, and waits for the device.
    """
    n, k = len(inputs.rows), inputs.captions
    if k == 1 and inputs.keys[0] is None:
        return inputs, False
    extra = len(inputs.cols) - k * n
    images = torch.arange(n, device=inputs.rows.device) + (comm.rank * n if comm else 0)
    owners = images, F.pad(images.repeat(k), (0, extra), value=-1)
    row_keys, col_keys = owners if inputs.keys[0] is None else inputs.keys
    assert row_keys is not None and col_keys is not None
    same = (row_keys == col_keys[:n]).long()  # an image and its text may have different keys
    more_texts = _equal(row_keys, col_keys, comm) - same
    more_images = _equal(col_keys, row_keys, comm) - F.pad(same.repeat(k), (0, extra))
    count = (more_texts > 0).sum()
    rows = int(comm.reduce(count) if comm else count)
    if rows == 0:
        return replace(inputs, keys=(None, None)), False
    shares = 1 / (1 + more_texts.double()), 1 / (1 + more_images.double())
    many = rows > MANY * n * (comm.size if comm else 1)
    return replace(inputs, keys=(row_keys, col_keys), owners=owners, shares=shares), many


def leave_out(scores: list[Tensor], tile: Block) -> None:
    """Set the scores (n, m) of pairs with equal keys to -inf, in place, unless they belong together."""
    rows, cols = tile.rows, tile.cols
    assert rows.keys is not None and cols.keys is not None and rows.owner is not None and cols.owner is not None
    same = (rows.keys[:, None] == cols.keys[None, :]) & (rows.owner[:, None] != cols.owner[None, :])
    for score in scores:
        score.masked_fill_(same, -torch.inf)


class Around:
    """A backend (see TorchBackend) for dot products around a plain one, in whose units it adds to gradients."""

    def __init__(self, plain: Backend) -> None:
        self.plain, self.missing_factor, self.other_lses = plain, plain.missing_factor, 0
        self.width_step, self.sums_scale_grad, self.sums_pairs = (
            plain.width_step,
            plain.sums_scale_grad,
            plain.sums_pairs,
        )


class Masked(Around):
    """Leaves pairs with equal keys out of a softmax.

    `exact` leaves them out in its tiles, for the rows and columns that have such a pair; `plain` does the others.
    """

    def __init__(self, plain: Backend, exact: Backend) -> None:
        super().__init__(plain)
        self.exact = exact

    def forward(self, block: Block) -> None:
        parts = [*self._parts(block)]  # with the log-sum-exps of earlier blocks
        self.plain.forward(block)
        for side, index, some, part in parts:
            self.exact.forward(part)
            assert side.lse is not None and some.lse is not None
            side.lse[index] = some.lse

    def backward(self, block: Block) -> None:
        self.plain.backward(replace(block, rows=_others(block.rows), cols=_others(block.cols)))
        missing = self.missing_factor(block.parameters.scale)
        for side, index, some, part in self._parts(block):
            assert some.weight is not None
            some.weight, some.grad = some.weight / missing, some.empty_grad()
            self.exact.backward(part)
            if block.parameters.scale_grad is not None:
                products = row_products(some.features, some.grad).sum()
                block.parameters.scale_grad += products * missing / block.parameters.scale
            if side.grad is not None:
                side.grad[index] += some.grad

    def _parts(self, block: Block) -> Iterator[tuple[RowBlock, Tensor, RowBlock, Block]]:
        """The rows that have a pair to leave out, against all columns; and such columns, against all rows.

        Each as their side of the block, which of it, a copy of them, and the block that they make."""
        parameters = Parameters(block.parameters.scale, block.parameters.bias)
        for side, other in ((block.rows, block.cols), (block.cols, block.rows)):
            if side.weight is not None and side.share is not None:
                index = (side.share < 1).nonzero()[:, 0]
                some, others = side[index], replace(other, weight=None)
                rows, cols = (some, others) if side is block.rows else (others, some)
                if len(index):
                    yield side, index, some, Block(rows, cols, parameters, None)


def _others(side: RowBlock) -> RowBlock:
    """The side with probabilities of 0 where it has a pair to leave out."""
    if side.lse is None or side.share is None:
        return side
    return replace(side, lse=side.lse.masked_fill(side.share < 1, ELSEWHERE))


class Corrected(Around):
    """Corrects pairs with equal keys: `positive`, or otherwise left out of a sum over pairs."""

    def __init__(self, plain: Backend, positive: bool) -> None:
        super().__init__(plain)
        self.positive = positive

    def forward(self, block: Block) -> None:
        self.plain.forward(block)
        for pairs in self._pairs(block):
            self._add_value(block, *pairs)

    def backward(self, block: Block) -> None:
        self.plain.backward(block)
        parameters = block.parameters
        unit = parameters.scale / self.missing_factor(parameters.scale)
        for i, j, scores, more in self._pairs(block):
            if self.sums_pairs and block.rows.target is not None:
                self._add_value(block, i, j, scores, more)
            change = -more if self.positive else -(scores + parameters.bias).sigmoid()
            if parameters.scale_grad is not None:
                parameters.scale_grad += (change * scores).sum() / parameters.scale
            if parameters.bias_grad is not None and self.sums_pairs:
                parameters.bias_grad += change.sum()
            ends = (block.rows, i), (block.cols, j)
            for (side, index), (other, at) in (ends, ends[::-1]):
                if side.grad is not None:
                    factor = (change * unit).to(side.grad.dtype)
                    add_rows(side.grad, index, widened(other.features[at]) * factor[:, None])

    def _add_value(self, block: Block, i: Tensor, j: Tensor, scores: Tensor, more: Tensor) -> None:
        logits = scores + block.parameters.bias if self.sums_pairs else scores
        assert block.rows.target is not None
        add_rows(block.rows.target, i, more * logits if self.positive else F.softplus(logits))

    def _pairs(self, block: Block) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Pairs that the plain backend takes otherwise, some at a time: rows and columns, and, in float64, their scores
        and how much more they weigh as positives."""
        for i, j in self._indices(block):
            diagonal = torch.zeros_like(i) if block.positive is None else (j - i == block.positive).long()
            wanted, more = diagonal == 0, (1 - diagonal).double() * self.sums_pairs
            for side, index in ((block.rows, i), (block.cols, j)):
                assert side.share is not None
                wanted |= (side.share[index] < 1) & self.positive
                if side.weight is not None:
                    more = more + side.weight[index] * (side.share[index] - diagonal)
            i, j, more = i[wanted], j[wanted], more[wanted]
            if len(i):
                yield i, j, block.parameters.scale * row_products(block.rows.features[i], block.cols.features[j]), more

    def _indices(self, block: Block) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and columns of pairs with equal keys, and of an image and its text with different ones."""
        rows, cols, diagonal = block.rows.keys, block.cols.keys, block.diagonal()
        assert rows is not None and cols is not None
        most = max(1, (2**24 if rows.is_cuda else 2**20) // block.rows.features.shape[1])
        ordered, order = cols.sort(stable=True)
        first, last = (torch.searchsorted(ordered, rows, right=right) for right in (False, True))
        ends = (last - first).cumsum(0)
        for start in range(0, int(ends[-1]), most):
            number = torch.arange(start, min(start + most, int(ends[-1])), device=rows.device)
            i = torch.searchsorted(ends, number, right=True)
            yield i, order[last[i] - (ends[i] - number)]
        if self.positive and diagonal is not None and block.positive is not None:
            i = (rows[diagonal[0]] != cols[diagonal[1]]).nonzero()[:, 0] + diagonal[0].start
            yield from ((part, part + block.positive) for part in i.split(most))


def add_rows(out: Tensor, index: Tensor, values: Tensor) -> None:
    """out[index] += values; equal indices in order, so that the same inputs give the same bits."""
    if out.is_cuda:
        out.index_put_((index,), values, accumulate=True)  # which sorts first
    else:
        out.index_add_(0, index, values)


def _equal(keys: Tensor, among: Tensor, comm: Communicator | None) -> Tensor:
    """How many of all ranks' `among` equal each of the keys."""
    ordered = (comm.gather(among) if comm else among).sort()[0]
    first, last = (torch.searchsorted(ordered, keys, right=right) for right in (False, True))
    return last - first
