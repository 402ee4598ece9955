"""Pairs that are no negatives: samples that share a key (the same caption or picture), and an image's own captions.

They are few. So a plain backend takes every score, as fast as without keys. `Shared` finds these pairs by sorting the
keys and corrects the difference pair by pair. With r_i and c_j over all scores, and P_i, P_j the positives,

    left out: r_i' = r_i + log1p(-sum over these j of e^(x_ij - r_i)), c_j' likewise, and their G_ij is 0
    positive: G_ij = a_i e^(x_ij - r_i) + b_j e^(x_ij - c_j) - a_i / |P_i| - b_j / |P_j|

Where nearly all of a sum is left out, the rest would be the difference of two large numbers. Then, and where the pairs
are many, tiles leave them out instead (`leave_out`).

Letters: n rows (images) and m columns (texts) of a block, k pairs or captions, D feature width.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from clipscale.loss.autograd import Backend
from clipscale.loss.block import Block, RowBlock, widened
from clipscale.loss.exchange import Communicator, Single
from clipscale.loss.inputs import Inputs
from clipscale.loss.similarity import row_products

LARGEST_SHARE = 7 / 8  # of a sum that may be left out: an eighth of its precision stays, and probabilities up to 7
FEW, PAIR_COST = 2**16, 128  # so many pairs are few; a pair costs about as much as so many scores in tiles


def prepared(inputs: Inputs, comm: Communicator | None, positive: bool) -> tuple[Inputs, bool]:
    """The inputs with keys for an image's captions and shares for positives, or without keys where no two are equal;
    and whether these pairs are many. Takes an all-gather of the keys, and waits for the device."""
    n, m, k = len(inputs.rows), len(inputs.cols), inputs.captions
    row_keys, col_keys = inputs.keys
    if k > 1 and row_keys is None:
        row_keys = torch.arange(n, device=inputs.rows.device) + (comm.rank * n if comm else 0)
        col_keys = F.pad(row_keys.repeat(k), (0, m - k * n), value=-1)
    if row_keys is None or col_keys is None:
        return inputs, False
    in_texts = _equal(row_keys, col_keys, comm)
    apart = (row_keys != col_keys[:n]).long()  # an image and its text may have different keys
    count = torch.stack([in_texts.sum(), n - apart.sum()])
    pairs, own = (comm.reduce(count) if comm else count).tolist()
    if pairs == own:
        return replace(inputs, keys=(None, None)), False
    if positive:
        in_images = _equal(col_keys, row_keys, comm) + F.pad(apart, (0, m - n))
        inputs = replace(inputs, shares=(1 / (in_texts + apart).double(), 1 / in_images.clamp_min(1).double()))
    ranks = comm.size if comm else 1
    return replace(inputs, keys=(row_keys, col_keys)), pairs > max(FEW, ranks**2 * n * m // PAIR_COST)


def leave_out(scores: list[Tensor], tile: Block) -> None:
    """Set the scores (n, m) of pairs with equal keys to -inf, in place, unless they are positives."""
    assert tile.rows.keys is not None and tile.cols.keys is not None
    same = tile.rows.keys[:, None] == tile.cols.keys[None, :]
    if tile.positive is not None:
        same.diagonal(tile.positive).fill_(False)
    for score in scores:
        score.masked_fill_(same, -torch.inf)


Pairs = tuple[Tensor, Tensor, Tensor, Tensor]
"""Rows (k,) and columns (k,) of pairs; float64 (k,): their scores, and how much more they weigh as positives than the
plain backend has it."""


class Shared:
    """A backend (see TorchBackend) that corrects what a plain one makes of pairs that share a key. Dot product only."""

    def __init__(self, plain: Backend, positive: bool) -> None:
        """positive: whether these pairs are positives, or left out."""
        self.plain, self.positive = plain, positive
        self.width_step, self.sums_scale_grad, self.sums_pairs = (
            plain.width_step,
            plain.sums_scale_grad,
            plain.sums_pairs,
        )
        self.other_lses, self.missing_factor = int(not positive and not plain.sums_pairs), plain.missing_factor

    def forward(self, block: Block) -> None:
        self.plain.forward(block)
        for pairs in self._pairs(block):
            self._add_value(block, pairs)
            for side, index in ((block.rows, pairs[0]), (block.cols, pairs[1])):
                if side.others is not None and side.lse is not None:
                    total = torch.zeros_like(side.lse)
                    add_rows(total, index, (pairs[2] - side.lse[index]).exp())
                    side.others[:, 0] = torch.logaddexp(side.others[:, 0], total.log_() + side.lse)

    def settled(self, rows: RowBlock, cols: RowBlock, exchange: Single) -> bool:
        """Take what is left out from the complete log-sum-exps. Returns whether enough is left, on all ranks."""
        too_much = rows.features.new_zeros(())
        for side in (rows, cols):
            if side.others is not None and side.lse is not None and side.weight is not None:
                share = (side.others[:, 0] - side.lse).exp_().masked_fill_(side.weight == 0, 0)
                side.lse += torch.log1p(-share)
                side.others, too_much = None, too_much + (share > LARGEST_SHARE).any()
        return not exchange.total(too_much)

    def backward(self, block: Block) -> None:
        self.plain.backward(block)
        parameters = block.parameters
        unit = parameters.scale / self.missing_factor(parameters.scale)
        for pairs in self._pairs(block):
            i, j, scores, more = pairs
            if self.sums_pairs and block.rows.target is not None:
                self._add_value(block, pairs)
            change = -more if self.positive else -self._probabilities(block, pairs)
            if parameters.scale_grad is not None:
                parameters.scale_grad += (change * scores).sum() / parameters.scale
            if parameters.bias_grad is not None and self.sums_pairs:
                parameters.bias_grad += change.sum()
            ends = (block.rows, i), (block.cols, j)
            for (side, index), (other, at) in (ends, ends[::-1]):
                if side.grad is not None:
                    factor = (change * unit).to(side.grad.dtype)
                    add_rows(side.grad, index, widened(other.features[at]) * factor[:, None])

    def _add_value(self, block: Block, pairs: Pairs) -> None:
        i, _, scores, more = pairs
        logits = scores + block.parameters.bias if self.sums_pairs else scores
        assert block.rows.target is not None
        if self.positive or self.sums_pairs:
            add_rows(block.rows.target, i, more * logits if self.positive else F.softplus(logits))

    def _probabilities(self, block: Block, pairs: Pairs) -> Tensor:
        """The pairs' part of the score gradient that does not come from positives."""
        i, j, scores, _ = pairs
        if self.sums_pairs:
            return (scores + block.parameters.bias).sigmoid()
        found = torch.zeros_like(scores)
        for side, index in ((block.rows, i), (block.cols, j)):
            if side.weight is not None and side.lse is not None:
                found += side.weight[index] * (scores - side.lse[index]).exp()
        return found

    def _pairs(self, block: Block) -> Iterator[Pairs]:
        """Those that the plain backend takes otherwise, some at a time."""
        for i, j in self._indices(block):
            diagonal = torch.zeros_like(i) if block.positive is None else (j - i == block.positive).long()
            wanted, more = diagonal == 0, (1 - diagonal).double() * self.sums_pairs
            for side, index in ((block.rows, i), (block.cols, j)):
                if side.share is not None:
                    wanted |= side.share[index] < 1
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
