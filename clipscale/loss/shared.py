"""Pairs that are no negatives: samples that share a key (the same caption or picture), and an image's own captions.

They are few. So a plain backend takes every score, as fast as without keys. `Shared` finds these pairs by sorting the
keys and corrects the difference pair by pair. With r_i and c_j over all scores, and P_i, P_j the positives,

    r_i' = r_i + log1p(-sum over left-out j of e^(x_ij - r_i))          c_j' likewise
    G_ij = a_i e^(x_ij - r_i') + b_j e^(x_ij - c_j')  (0 if left out)  - (a_i / |P_i| + b_j / |P_j|) [j in P_i]

Where nearly all of a sum is left out, the rest would be the difference of two large numbers. Then, and where the pairs
are many, tiles leave them out instead (`leave_out`).

Letters: n rows (images) and m columns (texts) of a block, k pairs, D feature width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

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


def prepared(inputs: Inputs, comm: Communicator | None, shared: str) -> tuple[Inputs, bool]:
    """The inputs with owners and shares, or without keys where no pair shares one; and whether these pairs are many.

    `shared` says what pairs of equal keys are. It takes an all-gather of the keys, and waits for the device.
    """
    n, m, k = len(inputs.rows), len(inputs.cols), inputs.captions
    keys, owners = inputs.keys, inputs.owners
    if k > 1:
        images = torch.arange(n, device=inputs.rows.device) + (comm.rank * n if comm else 0)
        owners = images, F.pad(images.repeat(k), (0, m - k * n), value=-1)
        keys, shared = (owners, "positive") if keys[0] is None else (keys, shared)
    row_keys, col_keys = keys
    if row_keys is None or col_keys is None:
        return inputs, False

    in_texts = _equal(row_keys, col_keys, comm)
    apart = (row_keys != col_keys[:n]).long()  # an image and its text may have different keys
    count = torch.stack([in_texts.sum(), k * n - apart.sum()])
    pairs, own = (comm.reduce(count) if comm else count).tolist()
    if pairs == own and k == 1:
        return replace(inputs, keys=(None, None)), False
    if shared == "positive":
        owners, in_images = (None, None), _equal(col_keys, row_keys, comm)
        counts = in_texts + apart, (in_images + F.pad(apart, (0, m - n))).clamp_min(1)
    else:
        counts = torch.full_like(row_keys, k), torch.ones_like(col_keys)
    shares = 1 / counts[0].double(), 1 / counts[1].double()
    ranks = comm.size if comm else 1
    return replace(inputs, keys=keys, owners=owners, shares=shares), pairs > max(FEW, ranks**2 * n * m // PAIR_COST)


def leave_out(scores: list[Tensor], tile: Block) -> None:
    """Set the scores (n, m) of pairs with equal keys to -inf, in place, unless they are positives."""
    rows, cols = tile.rows, tile.cols
    if rows.keys is None or cols.keys is None:
        return
    same = rows.keys[:, None] == cols.keys[None, :]
    if tile.positive is not None:
        same.diagonal(tile.positive).fill_(False)
    if rows.owner is not None and cols.owner is not None:
        same &= rows.owner[:, None] != cols.owner[None, :]
    for score in scores:
        score.masked_fill_(same, -torch.inf)


@dataclass
class Pairs:
    """Pairs of a block that a plain backend does not treat as the objective wants. All tensors are (k,)."""

    rows: Tensor
    cols: Tensor
    scores: Tensor  # float64
    out: Tensor  # float64, 1 where a pair is left out
    weight: Tensor  # float64, of the pair as a positive: what its score's gradient has less than the probabilities
    plain: Tensor  # float64, the same as the plain backend has it


class Shared:
    """A backend (see TorchBackend) that corrects what a plain one makes of pairs that share a key. Dot product only."""

    def __init__(self, plain: Backend, *, positive: bool, subtracts: bool) -> None:
        """positive: whether all pairs of equal keys are positives, or an image's own alone. subtracts: take the other
        pairs from what the plain backend has found; otherwise it has left them out itself."""
        self.plain, self.positive, self.subtracts = plain, positive, subtracts
        self.width_step, self.sums_scale_grad = plain.width_step, plain.sums_scale_grad
        self.sums_pairs, self.other_lses = plain.sums_pairs, int(subtracts and not plain.sums_pairs)
        self.missing_factor, self.stored = plain.missing_factor, plain.stored

    def forward(self, block: Block) -> None:
        self.plain.forward(block)
        for pairs in self._pairs(block):
            self._add_value(block, pairs)
            for side, index in ((block.rows, pairs.rows), (block.cols, pairs.cols)):
                if side.others is not None and side.lse is not None:
                    total = torch.zeros_like(side.lse)
                    add_rows(total, index, pairs.out * (pairs.scores - side.lse[index]).exp())
                    side.others[:, 0] = torch.logaddexp(side.others[:, 0], total.log_() + side.lse)

    def settled(self, rows: RowBlock, cols: RowBlock, exchange: Single) -> bool:
        """Take what is left out from the complete log-sum-exps. Returns whether, on all ranks, enough is left."""
        largest = rows.features.new_zeros((), dtype=torch.float64)
        for side in (rows, cols):
            if side.others is not None and side.lse is not None and side.weight is not None:
                share = (side.others[:, 0] - side.lse).exp_().masked_fill_(side.weight == 0, 0)
                side.lse += torch.log1p(-share)
                side.others, largest = None, torch.maximum(largest, share.max())
        return float(exchange.largest(largest)) <= LARGEST_SHARE

    def backward(self, block: Block) -> None:
        self.plain.backward(block)
        parameters = block.parameters
        unit = parameters.scale / self.missing_factor(parameters.scale)
        for pairs in self._pairs(block):
            if self.sums_pairs and block.rows.target is not None:
                self._add_value(block, pairs)
            probabilities = self._probabilities(block, pairs)
            change = pairs.plain - pairs.weight - pairs.out * probabilities
            if parameters.scale_grad is not None:
                parameters.scale_grad += (change * pairs.scores).sum() / parameters.scale
            if parameters.bias_grad is not None and self.sums_pairs:
                parameters.bias_grad += change.sum()
            plain = probabilities - pairs.plain
            change += plain - self.stored(plain, block.rows.features)  # which the plain backend has rounded
            ends = (block.rows, pairs.rows), (block.cols, pairs.cols)
            for (side, index), (other, at) in (ends, ends[::-1]):
                if side.grad is not None:
                    products = widened(other.features[at]) * (change * unit).to(side.grad.dtype)[:, None]
                    add_rows(side.grad, index, products)

    def _add_value(self, block: Block, pairs: Pairs) -> None:
        assert block.rows.target is not None
        logits = pairs.scores + block.parameters.bias if self.sums_pairs else pairs.scores
        value = (pairs.weight - pairs.plain) * logits
        add_rows(block.rows.target, pairs.rows, value + pairs.out * F.softplus(logits) if self.sums_pairs else value)

    def _probabilities(self, block: Block, pairs: Pairs) -> Tensor:
        if self.sums_pairs:
            return (pairs.scores + block.parameters.bias).sigmoid()
        ends = (block.rows, pairs.rows), (block.cols, pairs.cols)
        terms = [
            side.weight[index] * (pairs.scores - side.lse[index]).exp()
            for side, index in ends
            if side.weight is not None and side.lse is not None
        ]
        return torch.stack(terms).sum(0)

    def _pairs(self, block: Block) -> Iterator[Pairs]:
        rows, cols = block.rows, block.cols
        for i, j in self._indices(block):
            diagonal = torch.zeros_like(i) == 1 if block.positive is None else j - i == block.positive
            own = diagonal if rows.owner is None or cols.owner is None else rows.owner[i] == cols.owner[j]
            positive = own | self.positive
            wanted = (positive | self.subtracts) & ~diagonal
            for side, at in ((rows, i), (cols, j)):
                wanted |= diagonal & (side.share is not None and side.share[at] < 1)
            i, j, diagonal, positive = (x[wanted] for x in (i, j, diagonal, positive))
            if len(i) == 0:
                continue
            weight, plain = torch.ones((2, len(i)), dtype=torch.float64, device=i.device) * self.sums_pairs
            for side, at in ((rows, i), (cols, j)):
                if side.weight is not None and side.share is not None:
                    weight += side.weight[at] * side.share[at]
                    plain += side.weight[at]
            scores = block.parameters.scale * row_products(rows.features[i], cols.features[j])
            yield Pairs(i, j, scores, (~positive).double(), positive * weight, diagonal * plain)

    def _indices(self, block: Block) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and columns of the pairs that share a key, and of all positives, as many at a time as memory allows."""
        rows, cols, diagonal = block.rows.keys, block.cols.keys, block.diagonal()
        if rows is None or cols is None:
            return
        most = max(1, (2**24 if rows.is_cuda else 2**20) // block.rows.features.shape[1])
        ordered, order = cols.sort(stable=True)
        first, last = (torch.searchsorted(ordered, rows, right=right) for right in (False, True))
        ends = (last - first).cumsum(0)
        count = int(ends[-1])
        for start in range(0, count, most):
            number = torch.arange(start, min(start + most, count), device=rows.device)
            i = torch.searchsorted(ends, number, right=True)
            yield i, order[last[i] - (ends[i] - number)]
        if self.positive and diagonal is not None and block.positive is not None:
            i = (rows[diagonal[0]] != cols[diagonal[1]]).nonzero()[:, 0] + diagonal[0].start
            for part in i.split(most):
                yield part, part + block.positive


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
