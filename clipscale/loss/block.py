"""One block of the score matrix as a backend gets it: its rows, its columns, and the sums that both collect.

Letters: n rows (images), m columns (texts), D feature width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor

# The fields that another rank needs to use a BlockSide as columns. Sums and gradients stay.
SENT_FIELDS = ("features", "keys", "lse", "teacher_features", "teacher_lse")


@dataclass
class BlockSide:
    """One side of a block, its rows or its columns: the first dimension of every tensor."""

    # Given to the blocks:
    features: Tensor  # (n, D); for a module (n, ...)
    keys: Tensor | None = None  # (n,) int64; pairs with equal keys are left out of the negatives
    teacher_features: Tensor | None = None  # (n, sum of D_k) all teachers' features, side by side
    lse_weight: Tensor | None = None  # (n,) N times the weight of each log-sum-exp in the loss; None: it has none
    positive_weight: Tensor | None = None  # (n,) for the softmax's kernel alone: the weights of the positives
    # Collected by the blocks of a first sweep, and then given to those of the next:
    lse: Tensor | None = None  # (n,) float64 log-sum-exps of the scores
    teacher_lse: Tensor | None = None  # (n, K) float64, the log-sum-exps of each teacher's scores
    # Collected by the blocks:
    grad: Tensor | None = None  # like features, in sum_dtype; None if the features are frozen
    # Rows only: (n,) float64, each row's loss without its log-sum-exp, times N.
    row_loss: Tensor | None = None

    def __len__(self) -> int:
        return len(self.features)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by name."""
        return {name: x for name, x in vars(self).items() if x is not None}

    def __getitem__(self, index: slice | Tensor) -> "BlockSide":
        """These rows of every tensor. A slice gives views: writing to them writes to this side."""
        return BlockSide(**{name: x[index] for name, x in self.tensors().items()})

    def pack(self) -> list[Tensor | None]:
        """All fields in their order, for `save_for_backward`."""
        return list(vars(self).values())

    @classmethod
    def unpack(cls, saved: Iterator[Any]) -> "BlockSide":
        """The side whose `pack()` comes next in `saved`."""
        return cls(*islice(saved, len(fields(cls))))

    def tensors_to_send(self) -> list[Tensor]:
        """The tensors that another rank needs."""
        return [x for name, x in self.tensors().items() if name in SENT_FIELDS]

    def with_received(self, tensors: list[Tensor]) -> "BlockSide":
        """Another rank's side, given its `tensors_to_send()`. The weights are this side's: all ranks have the same."""
        names = [name for name in self.tensors() if name in SENT_FIELDS]
        return BlockSide(**dict(zip(names, tensors, strict=True)), lse_weight=self.lse_weight)

    def initial_lse(self) -> Tensor:
        """The log-sum-exps of no terms: -inf, (n,) float64."""
        return self.features.new_full((len(self),), -torch.inf, dtype=torch.float64)

    def zero_grad_buffer(self) -> Tensor:
        """A gradient of zeros, like the features, in sum_dtype."""
        return torch.zeros_like(self.features, dtype=sum_dtype(self.features.dtype))


@dataclass
class LossParameters:
    """The tensors that every rank has a copy of. A backend adds this rank's part of their gradients here."""

    scale: Tensor  # 0-d, the multiplier, in sum_dtype
    bias: Tensor  # 0-d, for the sigmoid objective
    trains_scale: bool = False
    bias_grad: Tensor | None = None  # 0-d float64; None if the bias is frozen
    module_grads: tuple[Tensor | None, ...] = ()  # one for each parameter of a similarity module
    scale_grad: Tensor | None = None  # 0-d float64; None until a backend adds to it

    @cached_property
    def scale_number(self) -> float:
        """The scale, on the host: read once, since that waits for the device."""
        return float(self.scale)

    def add_scale_grad(self, x: Tensor) -> None:
        """Add a block's part of the scale's gradient, 0-d float64.

        Optional: for similarities of degree one it follows from scale * dL/dscale = sum_i <u_i, dU_i>.
        """
        self.scale_grad = x if self.scale_grad is None else self.scale_grad + x


@dataclass(frozen=True)
class PositiveLayout:
    """An image's positives are its captions: caption c of row i is in column positive_offset + i + c * stride."""

    captions_per_image: int = 1
    stride: int = 0


ONE_CAPTION_PER_IMAGE = PositiveLayout()


@dataclass
class Block:
    """The scores of `rows` against `cols`.

    Row i has its first positive in column positive_offset + i. That may lie outside of the block, and the offset may be
    negative. The offset is None if the block holds no positive.
    """

    rows: BlockSide
    cols: BlockSide
    parameters: LossParameters
    positive_offset: int | None
    positive_layout: PositiveLayout = ONE_CAPTION_PER_IMAGE

    def split(self, height: int, width: int) -> Iterator["Block"]:
        """Blocks of at most height x width that cover this one, row by row. All tensors are views."""
        for row in range(0, len(self.rows), height):
            for col in range(0, len(self.cols), width):
                offset = None if self.positive_offset is None else self.positive_offset + row - col
                rows = self.rows[row : row + height]
                cols = self.cols[col : col + width]
                yield Block(rows, cols, self.parameters, offset, self.positive_layout)

    def masked_pairs(self) -> Tensor | None:
        """The pairs to leave out, (n, m) bool: equal keys, but not positives. None if all pairs count."""
        if self.rows.keys is None or self.cols.keys is None:
            return None
        same = self.rows.keys[:, None] == self.cols.keys
        same[self.positive_pairs()] = False
        return same if bool(same.any()) else None

    def positive_pairs(self) -> tuple[Tensor, Tensor]:
        """The rows and the columns of the positives in this block, pair by pair."""
        device = self.rows.features.device
        rows = [torch.arange(0, device=device)]
        cols = [torch.arange(0, device=device)]
        for caption in range(self.positive_layout.captions_per_image):
            diagonal = self.positive_diagonal(caption)
            if diagonal is not None:
                i, j = diagonal
                rows.append(torch.arange(i.start, i.stop, device=device))
                cols.append(torch.arange(j.start, j.stop, device=device))
        return torch.cat(rows), torch.cat(cols)

    def positive_diagonal(self, caption: int = 0) -> tuple[slice, slice] | None:
        """The rows and the columns of this caption's positives in this block. None if it has none."""
        if self.positive_offset is None:
            return None
        offset = self.positive_offset + caption * self.positive_layout.stride
        start = max(0, -offset)
        stop = min(len(self.rows), len(self.cols) - offset)
        if start >= stop:
            return None
        return slice(start, stop), slice(start + offset, stop + offset)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that sums of `dtype` are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_sum_dtype(x: Tensor) -> Tensor:
    """x in the type of its sums."""
    return x.to(sum_dtype(x.dtype))
