"""A block cut into panels for the Triton kernels: rectangles of whole tiles and bounded area, with aligned and padded operands.

Letters: n rows (images), m columns (texts) of the block or of a panel, D feature width.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from clipscale.loss.block import Block
from clipscale.loss.machine import Machine
from clipscale.loss.triton.softmax import merge_kernel
from clipscale.loss.triton.tuning import Tiles, Tuning, arithmetic_of

LOG2E = 1 / math.log(2)
LARGEST_HALF = 2.0**14  # the largest possible score gradient in float16: a quarter of its range
MERGED_LINES, MERGED_WIDTH = 16, 128


@dataclass
class Panel:
    """Rows i.. and columns j.. of a block. Tensors are views."""

    i: int
    j: int
    u: Tensor  # (n, D padded)
    v: Tensor  # (m, D padded)
    keys: tuple[Tensor | None, Tensor | None]
    positive: int  # column of the positive of the panel's first row; may be outside

    @property
    def rows(self) -> slice:
        return slice(self.i, self.i + len(self.u))

    @property
    def cols(self) -> slice:
        return slice(self.j, self.j + len(self.v))

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """n, m, D and the operands' strides, in the kernels' order."""
        return len(self.u), len(self.v), self.u.shape[1], self.u.stride(0), self.v.stride(0)


class PaddedBlock:
    """A block as the kernels take it."""

    def __init__(self, block: Block, fp32_precision: str, kernel_pass: str, tuning: Tuning, machine: Machine) -> None:
        rows, cols = block.rows, block.cols
        self.machine, self.tuning = machine, tuning
        self.scale, self.positive = block.parameters.scale, block.positive
        self.row_keys, self.col_keys = (None if x.keys is None else x.keys.contiguous() for x in (rows, cols))
        self.width, self.dtype, self.device = rows.features.shape[1], rows.features.dtype, rows.features.device
        self.arithmetic = arithmetic_of(self.dtype, fp32_precision)
        kernel_pass += "" if rows.keys is None else " with keys"
        self.tiles = tuning.tiles or machine.tiles(self.device, kernel_pass, self.arithmetic)
        self.u, self.v = (machine.aligned(x.features, self.tiles.depth) for x in (rows, cols))  # (n or m, D padded)

    @cached_property
    def factor(self) -> Tensor:
        """The scale in units of log 2 as the softmax kernels use it, 0-d float32."""
        return (self.scale.double() * LOG2E).float()

    @cached_property
    def units(self) -> Tensor:
        """Units of the kernels' scores in a nat, 0-d float64: log2(e), corrected for the rounding of `factor`."""
        return self.factor.double() / self.scale.double()

    def panels(self, height: int, width: int) -> Iterator[Panel]:
        """All panels of at most height x width, row by row."""
        corners = ((i, j) for i in range(0, len(self.u), height) for j in range(0, len(self.v), width))
        return self.machine.parts(self._panel(i, j, height, width) for i, j in corners)

    def _panel(self, i: int, j: int, height: int, width: int) -> Panel:
        u, v = self.u[i : i + height], self.v[j : j + width]
        row_keys = None if self.row_keys is None else self.row_keys[i : i + height]
        col_keys = None if self.col_keys is None else self.col_keys[j : j + width]
        # Without a positive, one past the end: no row reaches it.
        return Panel(i, j, u, v, (row_keys, col_keys), len(v) if self.positive is None else self.positive + i - j)

    def panel_shape(self, area: int) -> tuple[int, int]:
        """Height and width, in whole tiles, of about equal panels of at most about `area`, as square as the block allows."""
        n, m = len(self.u), len(self.v)
        height = min(n, max(math.isqrt(area), area // m, 1))
        width = min(m, max(area // height, 1))
        return _even(n, height, self.tiles.rows), _even(m, width, self.tiles.cols)

    def grid(self, panel: Panel) -> int:
        """Number of tiles."""
        return triton.cdiv(len(panel.u), self.tiles.rows) * triton.cdiv(len(panel.v), self.tiles.cols)

    def launch(self, kernel: Any, panel: Panel, *arguments: Any, **constants: Any) -> None:
        """Run the kernel on every tile of the panel."""
        t = self.tiles
        self.machine.launch(
            kernel, self.grid(panel), self.device, t, *arguments, **constants, KEYS=self.row_keys is not None,
            PRECISION="tf32" if self.arithmetic == "tf32" else "ieee", BM=t.rows, BN=t.cols, BK=t.depth, GROUP=t.group,
        )  # fmt: skip

    def score_gradients(self) -> Tensor:
        """Memory for a panel of score gradients, in whole tiles so that no store needs a mask."""
        shape = self.panel_shape(self.tuning.panel_bytes // self.dtype.itemsize)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def add_products(self, panel: Panel, scores: Tensor, d_u: Tensor | None, d_v: Tensor | None) -> None:
        """d_u += G V and d_v += G' U for the panel of score gradients at the start of `scores`."""
        g_nm = scores[: len(panel.u), : len(panel.v)]
        if d_u is not None:
            self.machine.add_product(d_u[panel.rows], g_nm, panel.v[:, : self.width])
        if d_v is not None:
            self.machine.add_product(d_v[panel.cols], g_nm.T, panel.u[:, : self.width])

    @contextlib.contextmanager
    def accumulating(self, bound: Tensor, d_u: Tensor | None, d_v: Tensor | None) -> Iterator[Tensor]:
        """The gradient scale, 0-d: the factor of score gradients when they are stored. It is the logit scale; in float16, over a unit.

        bfloat16 and float32 have the range for any gradient. float16 does not: a weight of 1/2N is below its normal numbers from
        N = 8192 on, before any probability, and a loss scaler's factor is above them. So float16 gradients are stored in a unit, a power
        of two for which `bound`, the largest possible |scale G|, becomes 2^13..2^14. d_u and d_v are divided by that unit, which is exact,
        while products are added to them.
        """
        gradient_scale = self.scale
        grads = [d for d in (d_u, d_v) if d is not None]
        if self.dtype == torch.float16:
            unit = torch.exp2(torch.where(bound > 0, bound / LARGEST_HALF, 1.0).log2().ceil())
            gradient_scale = gradient_scale / unit
            for d in grads:
                d.div_(unit)
        try:
            yield gradient_scale
        finally:
            if self.dtype == torch.float16:
                for d in grads:
                    d.mul_(unit)


class RunningSum:
    """Sums of exponentials, total * 2^reference, of the n rows (or m columns) of a block."""

    def __init__(self, size: int, device: torch.device, machine: Machine) -> None:
        self.reference = torch.full((size,), -torch.inf, dtype=torch.float32, device=device)
        self.total = torch.zeros(size, dtype=torch.float32, device=device)
        self.machine = machine

    def merge(self, where: slice, lines: int, references: Tensor, totals: Tensor) -> None:
        """Merge `lines` lines of partial sums (lines, entries of `where`) into the entries `where`, in their order."""
        reference, total = self.reference[where], self.total[where]
        self.machine.launch(
            merge_kernel, triton.cdiv(len(total), MERGED_WIDTH), total.device, Tiles(0, 0, 0, warps=4, stages=2),
            references, totals, reference, total, lines, len(total),
            LINES=MERGED_LINES, WIDTH=MERGED_WIDTH,
        )  # fmt: skip

    def log(self, units: Tensor) -> Tensor:
        """The natural logarithms, float64."""
        return (self.reference.double() + self.total.double().log2()) / units


def in_units(
    lse: Tensor | None, weight: Tensor | None, units: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(lse in the kernels' units, the weight corrected for the rounding of it, the weight), float32; three None without a softmax."""
    if lse is None or weight is None:
        return None, None, None
    exact = lse.double() * units
    rounded = exact.float()
    correction = (rounded - exact).nan_to_num(0.0).exp2()  # nan: -inf - -inf, a row with no pairs
    return rounded, (weight * correction).float(), weight.float().contiguous()


def _even(size: int, most: int, tile: int) -> int:
    """Size of each of the fewest about equal parts of at most `most` (rounded up to whole tiles)."""
    parts = triton.cdiv(size, most)
    return triton.cdiv(triton.cdiv(size, parts), tile) * tile
