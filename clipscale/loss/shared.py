"""Pairs that are no negatives: samples that share a key (the same caption or picture), and an image's own captions.

They are few. So a plain backend computes every score, as fast as without keys, and is corrected: `Corrected` adds the
difference that positives make, and pairs left out under the sigmoid, pair by pair. `Masked` computes anew, in torch's
tiles, the rows and columns of which the softmax leaves something out. (Where a double matches better than the pair
itself, nearly all of a sum is left out, and a difference of sums is rounding.)

Letters: n rows (images) and m columns (texts), k captions of an image or pairs, D feature width.
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

ELSEWHERE = 2.0**20  # nats: of a log-sum-exp beside which every exponential is 0


def prepared(inputs: Inputs, comm: Communicator | None) -> Inputs:
    """The inputs with owners and shares, or without keys where no two samples share one.

    It gathers the keys of all ranks, and waits for the device.
    """
    n, k, (row_keys, col_keys) = len(inputs.rows), inputs.captions, inputs.keys
    if k == 1 and row_keys is None:
        return inputs
    extra = len(inputs.cols) - k * n
    images = torch.arange(n, device=inputs.rows.device) + (comm.rank * n if comm else 0)
    owners = images, F.pad(images.repeat(k), (0, extra), value=-1)
    if row_keys is None or col_keys is None:
        row_keys, col_keys = owners

    def equal(keys: Tensor, among: Tensor) -> Tensor:
        ordered = (comm.gather(among) if comm else among).sort()[0]
        return torch.searchsorted(ordered, keys, right=True) - torch.searchsorted(ordered, keys)

    counts = equal(row_keys, col_keys), equal(col_keys, row_keys)
    counts[1][k * n :] += 1  # as if hard negatives had an image
    others = (counts[0] - 1).sum()
    if int(comm.reduce(others) if comm else others) == 0:
        return replace(inputs, keys=(None, None))
    shares = 1 / counts[0].double(), 1 / counts[1].double()
    return replace(inputs, keys=(row_keys, col_keys), owners=owners, shares=shares)


def leave_out(scores: Tensor, tile: Block) -> None:
    """Set the scores (n, m) of pairs with equal keys to -inf, in place, unless they belong together."""
    rows, cols = tile.rows, tile.cols
    assert rows.keys is not None and cols.keys is not None and rows.owner is not None and cols.owner is not None
    same = (rows.keys[:, None] == cols.keys[None, :]) & (rows.owner[:, None] != cols.owner[None, :])
    scores.masked_fill_(same, -torch.inf)


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
    """Leaves pairs with equal keys out of a softmax: of the rows and columns that have some, by `exact`'s tiles."""

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
        rows, cols = (
            x if x.lse is None else replace(x, lse=x.lse.masked_fill(_special(x), ELSEWHERE))
            for x in (block.rows, block.cols)
        )
        self.plain.backward(replace(block, rows=rows, cols=cols))
        missing, scale = self.missing_factor(block.parameters.scale), block.parameters.scale
        for side, index, some, part in self._parts(block):
            some.weight, some.grad = None if some.weight is None else some.weight / missing, some.empty_grad()
            self.exact.backward(part)
            if block.parameters.scale_grad is not None:
                block.parameters.scale_grad += row_products(some.features, some.grad).sum() * missing / scale
            if side.grad is not None:
                side.grad[index] += some.grad

    def _parts(self, block: Block) -> Iterator[tuple[RowBlock, Tensor, RowBlock, Block]]:
        """The rows with something to leave out, against all columns; and such columns, against all rows.

        Each as their side of the block, which of it, a copy of them, and the block that they make."""
        parameters = Parameters(block.parameters.scale, block.parameters.bias)
        for side, other in ((block.rows, block.cols), (block.cols, block.rows)):
            index = _special(side).nonzero()[:, 0]
            if side.weight is not None and len(index):
                some, others = side[index], replace(other, weight=None)
                rows, cols = (some, others) if side is block.rows else (others, some)
                yield side, index, some, Block(rows, cols, parameters, None)


def _special(side: RowBlock) -> Tensor:
    """Whether a sample shares its key with one that is not its own, (n,) bool."""
    assert side.share is not None
    return side.share < 1


class Corrected(Around):
    """Corrects pairs with equal keys: `positive`, or otherwise left out of a sum over pairs."""

    def __init__(self, plain: Backend, positive: bool) -> None:
        super().__init__(plain)
        self.positive = positive

    def forward(self, block: Block) -> None:
        self.plain.forward(block)
        for i, _, scores, more in self._pairs(block):
            self._add_value(block, i, scores, more)

    def backward(self, block: Block) -> None:
        self.plain.backward(block)
        parameters = block.parameters
        unit = parameters.scale / self.missing_factor(parameters.scale)
        for i, j, scores, more in self._pairs(block):
            if self.sums_pairs and block.rows.target is not None:
                self._add_value(block, i, scores, more)
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

    def _add_value(self, block: Block, i: Tensor, scores: Tensor, more: Tensor) -> None:
        logits = scores + block.parameters.bias if self.sums_pairs else scores
        assert block.rows.target is not None
        add_rows(block.rows.target, i, more * logits if self.positive else F.softplus(logits))

    def _pairs(self, block: Block) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Rows and columns of pairs with equal keys, but for those on the diagonal that the plain backend has right; in
        float64 their scores, and how much more they weigh as positives. As many at a time as memory allows."""
        rows, cols = block.rows.keys, block.cols.keys
        assert rows is not None and cols is not None
        most = max(1, (2**24 if rows.is_cuda else 2**20) // block.rows.features.shape[1])
        ordered, order = cols.sort(stable=True)
        last = torch.searchsorted(ordered, rows, right=True)
        ends = (last - torch.searchsorted(ordered, rows)).cumsum(0)
        for start in range(0, int(ends[-1]), most):
            number = torch.arange(start, min(start + most, int(ends[-1])), device=rows.device)
            i = torch.searchsorted(ends, number, right=True)
            j = order[last[i] - (ends[i] - number)]
            diagonal = torch.zeros_like(i) if block.positive is None else (j - i == block.positive).long()
            wanted, more = diagonal == 0, (1 - diagonal).double() * self.sums_pairs
            for side, index in ((block.rows, i), (block.cols, j)):
                wanted |= _special(side)[index] & self.positive
                if side.weight is not None and side.share is not None:
                    more = more + side.weight[index] * (side.share[index] - diagonal)
            i, j, more = i[wanted], j[wanted], more[wanted]
            if len(i):
                yield i, j, block.parameters.scale * row_products(block.rows.features[i], block.cols.features[j]), more


def add_rows(out: Tensor, index: Tensor, values: Tensor) -> None:
    """out[index] += values; equal indices in order, so that the same inputs give the same bits."""
    if out.is_cuda:
        out.index_put_((index,), values, accumulate=True)  # which sorts first
    else:
        out.index_add_(0, index, values)
