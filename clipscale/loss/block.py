"""What a loss backend is given: one block of the score matrix, with the running sums of its rows and columns.

Letters: n rows (images), m columns (texts), D feature width, T tokens of one sample.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

# What another rank needs of a side in order to use it as columns; the rest (sums, gradients) is local.
TRAVELLING = ("features", "mask", "keys", "lse")


@dataclass
class Side:
    """The rows, or the columns, of a block. Every tensor has one entry per row (column) in its first dimension."""

    features: Tensor  # (n, D); with token features (n, T, D); for a custom similarity (n, ...)
    mask: Tensor | None = None  # (n, T) bool, true where a token counts
    keys: Tensor | None = None  # (n,) int64; other pairs with equal keys are left out of the sums
    weight: Tensor | None = None  # (n,) a_i or b_j up to the common factor 1/N; None: no softmax in this direction
    lse: Tensor | None = (
        None  # (n,) float64 log-sum-exp of the scores; running in the forward pass, complete in the backward
    )
    grad: Tensor | None = None  # like features, accumulation dtype; None: frozen
    target: Tensor | None = None  # (n,) float64, rows only: the sum of what is subtracted from the log-sum-exps

    def __len__(self) -> int:
        return len(self.features)

    def present(self) -> dict[str, Tensor]:
        """The tensors that this side has, by name."""
        return {f.name: x for f in fields(self) if (x := getattr(self, f.name)) is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> "Side":
        """This side with `function` applied to every tensor."""
        return Side(**{name: function(x) for name, x in self.present().items()})

    def narrow(self, start: int, stop: int) -> "Side":
        """Views of the entries start..stop: writing to them writes to this side."""
        return self.map(lambda x: x[start:stop])

    def travelling(self) -> list[Tensor]:
        """The tensors that another rank needs."""
        return [x for name, x in self.present().items() if name in TRAVELLING]

    def arrived(self, tensors: list[Tensor]) -> "Side":
        """Another rank's side, given its `travelling()`; what does not travel is left out, but for the weights, which are the same."""
        names = [name for name in self.present() if name in TRAVELLING]
        return Side(**dict(zip(names, tensors, strict=True)), weight=self.weight)

    def collecting(self, field: str, total: Tensor | None) -> "Side":
        """This side with `total` as the place where `field` ("lse" or "grad") is summed up."""
        return replace(self, lse=total) if field == "lse" else replace(self, grad=total)


@dataclass
class Shared:
    """The tensors that every rank has a copy of, and where the backward pass adds up this rank's part of their gradients."""

    scale: Tensor  # 0-d, the multiplier, accumulation dtype
    bias: Tensor  # 0-d, added to the logits of the sigmoid objective
    scale_grad: Tensor | None = (
        None  # 0-d float64, as the bias's; only for a backend that sums it (Backend.sums_scale_grad)
    )
    bias_grad: Tensor | None = None
    parameter_grads: tuple[Tensor | None, ...] = ()  # of a custom similarity's parameters


@dataclass
class Block:
    """The scores of `rows` against `cols`.

    `positive` is the column of row 0's positive: row i has its positive in column positive + i, which may lie outside of the block
    (a tile's may even be negative). None: the block holds no positive at all.
    """

    rows: Side
    cols: Side
    shared: Shared
    positive: int | None

    def tile(self, row: int, height: int, col: int, width: int) -> "Block":
        """The part of the block from (row, col), at most height x width; views throughout."""
        positive = None if self.positive is None else self.positive + row - col
        return Block(self.rows.narrow(row, row + height), self.cols.narrow(col, col + width), self.shared, positive)

    @property
    def offset(self) -> int:
        """The diagonal of the positives, for Tensor.diagonal."""
        assert self.positive is not None
        return self.positive

    def diagonal(self) -> tuple[slice, slice] | None:
        """The rows and the columns, in step, of the positives inside this block; None where there are none."""
        if self.positive is None:
            return None
        start = max(0, -self.positive)
        stop = min(len(self.rows), len(self.cols) - self.positive)
        return (slice(start, stop), slice(start + self.positive, stop + self.positive)) if start < stop else None


def exclude_duplicates(scores: list[Tensor], block: Block) -> None:
    """Set to -inf, in place, the scores of pairs that are no positives though their keys agree."""
    if block.rows.keys is None or block.cols.keys is None:
        return
    same = block.rows.keys[:, None] == block.cols.keys[None, :]
    if block.positive is not None:
        same.diagonal(block.positive).fill_(False)
    for score in scores:
        score.masked_fill_(same, -torch.inf)
