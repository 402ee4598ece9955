"""The gradient of one side's features: float32 sums while blocks are visited, then rounded to the features' type.

Letters: n rows of the side (images or texts), D feature width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from clipscale.loss.block import RowBlock
from clipscale.loss.similarity import row_products

# Rows whose float32 gradient exists at a time, where it is then rounded to half precision: the height of a panel.
SLAB = 2**14
# Float32 sums of columns beyond those that fit into the result's own memory. With panels of 512 MiB the loss of 2^20 pairs then takes
# under 1.9 GiB beyond features and gradients up to D = 1280. From D = 641 on some columns need a second pass over their scores: 10 % of
# them at D = 768 and 26 % at D = 1280, which is 3 % and 7 % of the matmuls.
SPARE_BYTES = (5 << 28) - (1 << 26)
GRAIN = 2**12  # columns at which a gradient is split: whole tiles of every backend
LARGEST_HALF = 2.0**14  # the largest number of a row in float16: a quarter of its range


class Finished(NamedTuple):
    """A gradient, or some rows of it: `grad`, times `units` where there are any."""

    grad: Tensor  # (n, D), like the features
    products: Tensor | None = None  # (n,) float64: <u_i, dU_i>
    units: Tensor | None = None  # (n,) float32, powers of two

    def part(self, own: Callable[[Tensor], Tensor]) -> "Finished":
        """The rows that `own` picks."""
        return Finished(*(None if x is None else own(x) for x in self))  # type: ignore[arg-type]

    def times(self, factor: Tensor) -> Tensor:
        """The gradient times a number (0-d, on its device), in place."""
        grad, shape = self.grad, (-1, *[1] * (self.grad.dim() - 1))
        factor = factor.to(torch.promote_types(grad.dtype, torch.float32))
        factors = factor.expand(len(grad)) if self.units is None else self.units * factor
        for x, f in zip(grad.split(SLAB), factors.split(SLAB)):
            x.mul_(f.view(shape))
        return grad


@dataclass
class Rounding:
    """How float32 (float64) sums become a gradient: times `factor`, then rounded.

    `in_units`: another factor follows, which may be large. A row in float16, which has few exponents, then gets a unit of its own.
    """

    factor: Tensor
    needs_products: bool = False  # whether <u_i, dU_i> is needed for each row
    in_units: bool = False

    def finished(self, features: Tensor, sums: Tensor, like: Tensor) -> Finished:
        """The rows' gradient, with the type and the width of `like`. Overwrites the sums."""
        sums.mul_(self.factor)
        products = row_products(features, sums) if self.needs_products else None
        units = None
        if self.has_units(like):
            largest = sums.flatten(1).abs().amax(1)
            units = (largest / LARGEST_HALF).clamp_min(2.0**-100).log2().ceil().exp2()
            sums.div_(units.view(-1, *[1] * (sums.dim() - 1)))
        return Finished(_unpadded(sums, like).to(like.dtype).contiguous(), products, units)

    def has_units(self, like: Tensor) -> bool:
        return self.in_units and like.dtype == torch.float16


class WholeGradient:
    """The gradient of a side, with the sums of all rows at once.

    `like` are the caller's features: they have the gradient's type, and no padding.
    """

    def __init__(self, side: RowBlock, like: Tensor, rounding: Rounding) -> None:
        self.side, self.like, self.rounding = side, like, rounding
        side.grad = side.empty_grad()

    def parts(self) -> Iterator[tuple[int, RowBlock]]:
        """The index of the first row, and rows with a place for their sums; again for every visit."""
        yield 0, self.side

    def result(self) -> Finished:
        assert self.side.grad is not None
        return self.rounding.finished(self.side.features, self.side.grad, self.like)


class SlabGradient(WholeGradient):
    """The same in half precision, for rows that are visited once: SLAB rows at a time have float32 sums."""

    def __init__(self, side: RowBlock, like: Tensor, rounding: Rounding) -> None:
        self.side, self.like, self.rounding = side, like, rounding
        features, n = side.features, len(side)
        self.found = Finished(
            torch.empty_like(_unpadded(features, like), dtype=like.dtype, memory_format=torch.contiguous_format),
            features.new_empty(n, dtype=torch.float64) if rounding.needs_products else None,
            features.new_empty(n, dtype=torch.float32) if rounding.has_units(like) else None,
        )

    def parts(self) -> Iterator[tuple[int, RowBlock]]:
        for start in range(0, len(self.side), SLAB):
            part = self.side[start : start + SLAB]
            part.grad = part.empty_grad()
            yield start, part
            self.finish(start, part.features, part.grad)

    def finish(self, start: int, features: Tensor, sums: Tensor) -> None:
        """Write the sums of the rows from `start` on into the result."""
        for i in range(0, len(sums), SLAB // 4):  # of which a copy in half precision exists at a time
            u, x = features[i : i + SLAB // 4], sums[i : i + SLAB // 4]
            here = slice(start + i, start + i + len(x))
            for whole, part in zip(self.found, self.rounding.finished(u, x, self.like)):
                if whole is not None and part is not None:
                    whole[here] = part

    def result(self) -> Finished:
        return self.found


class SplitGradient(SlabGradient):
    """The same for rows that are visited several times, or for columns.

    The sums of the first half (of fewer rows where features are padded) are in the memory of the result. Row i is rounded to where row
    i/2 was, never over a later row. The sums of the other rows have their own memory, at most `spare_bytes` of it. Rows beyond that,
    `later_parts`, are visited once more: the first visits leave their gradient out.
    """

    def __init__(self, side: RowBlock, like: Tensor, rounding: Rounding, spare_bytes: int | None = None) -> None:
        super().__init__(side, like, rounding)
        self.is_finished = False
        n, row_size, grad = len(side), side.features[0].numel(), self.found.grad
        self.half = grad.numel() // (2 * row_size) // GRAIN * GRAIN
        self.spare = n - self.half
        if spare_bytes is not None:
            self.spare = min(self.spare, max(1, spare_bytes // (4 * row_size) // GRAIN) * GRAIN)
        in_result = grad.view(-1)[: 2 * self.half * row_size].view(torch.float32)
        self.sums = (
            in_result.view(self.half, *side.features.shape[1:]).zero_(),
            torch.zeros_like(side.features[: self.spare], dtype=torch.float32),
        )

    def parts(self) -> Iterator[tuple[int, RowBlock]]:
        end = self.half + self.spare
        for start, stop, sums in ((0, self.half, self.sums[0]), (self.half, end, self.sums[1])):
            yield start, replace(self.side[start:stop], grad=sums)
        if end < len(self.side):
            yield end, self.side[end:]

    def later_parts(self) -> Iterator[tuple[int, RowBlock]]:
        """The rows that `parts` gave without a place for their sums."""
        self._finish_first()
        for start in range(self.half + self.spare, len(self.side), self.spare):
            part = self.side[start : start + self.spare]
            part.grad = self.sums[1][: len(part)].zero_()
            yield start, part
            self.finish(start, part.features, part.grad)

    def _finish_first(self) -> None:
        for start, sums in zip((0, self.half), self.sums):
            self.finish(start, self.side.features[start : start + len(sums)], sums)
        self.is_finished = True

    def result(self) -> Finished:
        if not self.is_finished:
            self._finish_first()
        return super().result()


def is_large(side: RowBlock, like: Tensor) -> bool:
    """Whether a gradient is too large for a second copy of it in float32."""
    return like.dtype.itemsize < 4 and len(side) > SLAB


def _unpadded(x: Tensor, like: Tensor) -> Tensor:
    return x[..., : like.shape[-1]] if like.dim() > 1 else x
