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
from triton.tools.tensor_descriptor import TensorDescriptor

from clipscale.loss.block import Block
from clipscale.loss.machine import Machine
from clipscale.loss.objective import Softmax
from clipscale.loss.triton.tuning import GLUON_ROWS, Tiles, Tuning, arithmetic_of, gluon_tiles

LOG2E = 1 / math.log(2)
LARGEST_HALF = 2.0**14  # the largest possible score gradient in float16: a quarter of its range
# The reference t of columns lies so many units of log 2 under the largest of rows. A row or column as far below t loses no probability
# above 2^-46; further below it is special.
HEADROOM = 60.0
SLOTS = 14  # tiles of 128 x 64 halves that fit in Hopper's and Blackwell's shared memory, 227 KiB, beside barriers


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


@dataclass
class SideTerms:
    """What the gradient kernels take for each row (or column) of a block, float32. r is its log-sum-exp, in units of log 2.

    Every term but r and the rows' factor contains the gradient scale.
    """

    lse: Tensor  # r
    factor: Tensor  # of rows 2^(r - t), with one t for the block; of columns weight 2^(t - r)
    weight: Tensor  # corrected for the rounding of r
    target: Tensor  # weight (1 - label smoothing)
    smoothing: Tensor  # weight times the target of each candidate
    low: Tensor  # for each tile, int8: is an r so far below t that the factor is no use
    size: int  # rows of a tile

    def part(self, where: slice) -> "SideTerms":
        """The terms of some rows, which begin a tile."""
        of_tiles = slice(where.start // self.size, triton.cdiv(where.stop, self.size))
        lse, factor, weight, target, smoothing = (
            x[where] for x in (self.lse, self.factor, self.weight, self.target, self.smoothing)
        )
        return SideTerms(lse, factor, weight, target, smoothing, self.low[of_tiles].clone(), self.size)


def chosen_tiles(device: torch.device, kernel_pass: str, arithmetic: str, tuning: Tuning, machine: Machine) -> Tiles:
    """The caller's tiles, a warp-specialised kernel's where one is wanted and exists, or the table's."""
    gluon = gluon_tiles(machine.compute_capability(device), kernel_pass, arithmetic) if tuning.gluon else None
    return tuning.tiles or gluon or machine.tiles(device, kernel_pass, arithmetic)


class PaddedBlock:
    """A block as the kernels take it."""

    def __init__(self, block: Block, fp32_precision: str, kernel_pass: str, tuning: Tuning, machine: Machine) -> None:
        rows, cols = block.rows, block.cols
        self.machine, self.tuning = machine, tuning
        self.scale, self.positive = block.parameters.scale, block.positive
        self.row_keys, self.col_keys = _ranks(rows.keys, cols.keys)
        self.width, self.dtype, self.device = rows.features.shape[1], rows.features.dtype, rows.features.device
        self.arithmetic = arithmetic_of(self.dtype, fp32_precision)
        kernel_pass += "" if rows.keys is None else " with keys"
        self.tiles = chosen_tiles(self.device, kernel_pass, self.arithmetic, tuning, machine)
        self.u, self.v = (machine.aligned(x.features, self.tiles.depth) for x in (rows, cols))  # (n or m, D padded)

    @cached_property
    def factor(self) -> Tensor:
        """The scale in units of log 2 as the softmax kernels use it, 0-d float32."""
        return (self.scale.double() * LOG2E).float()

    @cached_property
    def units(self) -> Tensor:
        """Units of the kernels' scores in a nat, 0-d float64: log2(e), corrected for the rounding of `factor`."""
        return self.factor.double() / self.scale.double()

    def panels(self, height: int, width: int, edge_apart: bool = False, split: int = 0) -> Iterator[Panel]:
        """All panels of at most height x width, row by row, none with rows before and after row `split`. `edge_apart`: columns that fill
        no whole tile make panels of their own."""
        n, m = len(self.u), len(self.v)
        whole = m // self.tiles.cols * self.tiles.cols if edge_apart else m
        spans = [(j, min(width, whole - j)) for j in range(0, whole, width)]
        spans += [(whole, m - whole)] if whole < m else []
        rows = [
            (i, min(height, stop - i)) for start, stop in ((0, split), (split, n)) for i in range(start, stop, height)
        ]
        corners = ((i, j, high, wide) for i, high in rows for j, wide in spans)
        return self.machine.parts(self._panel(*corner) for corner in corners)

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

    @property
    def has_descriptors(self) -> bool:
        """Whether the architecture loads by descriptors. Products of float32 without tensor cores would then spill."""
        return self.machine.compute_capability(self.device) >= 90 and self.arithmetic != "ieee"

    def described(self, x: Tensor, height: int, width: int) -> Any:
        """A matrix as kernels take it: with `has_descriptors` a tensor descriptor with blocks of height x width."""
        return TensorDescriptor.from_tensor(x, [height, width]) if self.has_descriptors else x

    def launch(
        self, kernel: Any, panel: Panel, grid: int, *arguments: Any, tiles: Tiles | None = None, **constants: Any
    ) -> None:
        """Run so many programs of the kernel on the panel, with its operands in front of the arguments."""
        t, capability = tiles or self.tiles.plain, self.machine.compute_capability(self.device)
        operands = [self.described(x, size, t.depth) for x, size in ((panel.u, t.rows), (panel.v, t.cols))]
        optional = {
            "KEYS": self.row_keys is not None,
            "PRECISION": "tf32" if self.arithmetic == "tf32" else "ieee",
            "BK": t.depth,
            "GROUP": t.group,
            "HEIGHT": self.tiles.rows,
            "PAIRS": capability // 10 != 10,  # Blackwell's dot products lie in tensor memory, a row to a thread
        }
        self.machine.launch(
            kernel, grid, self.device, t, *operands, *arguments, **constants, TMA=self.has_descriptors, BM=t.rows, BN=t.cols,
            **{name: x for name, x in optional.items() if name in kernel.arg_names},
        )  # fmt: skip

    def launch_gluon(self, name: str, panel: Panel, *given: Any, scores: Tensor | None = None, **flags: bool) -> None:
        """Run a kernel of gluon_kernels.py on the panel, with its operands, and `scores` if it stores there, in front of what is given."""
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia import hopper

        from clipscale.loss.triton import gluon_kernels

        def described(x: Tensor, height: int, width: int) -> Any:
            layout = NVMMASharedLayout(min(128, width * x.element_size()), 8 * x.element_size(), 2)
            return hopper.TensorDescriptor.from_tensor(x, [height, width], layout)

        t, (n, m, depth, *_) = self.tiles, panel.sizes
        operands = [described(panel.u, GLUON_ROWS, t.depth), described(panel.v, t.cols, t.depth)]
        operands += [] if scores is None else [described(scores, GLUON_ROWS, t.cols // 4)]
        self.machine.launch(
            getattr(gluon_kernels, name), t.group * triton.cdiv(m, t.cols), self.device, t, *operands, *given,
            n, m, depth, panel.positive, t.group, **flags, BM=GLUON_ROWS, BN=t.cols, BK=t.depth,
            HALVES=t.rows // GLUON_ROWS, STAGES=t.stages, **shared_slots(t, depth // t.depth, scores is not None),
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


def shared_slots(tiles: Tiles, steps: int, stores: bool) -> dict[str, Any]:
    """How a warp-specialised kernel divides shared memory: the steps of the columns' operand that stay, and whether others are loaded with
    each tile. `stores`: whether buffers of the panel take a slot for each consumer."""
    left = SLOTS - (tiles.stages + stores) * (tiles.rows // GLUON_ROWS)
    streams = steps > left
    return {"RESIDENT": left - tiles.stages if streams else steps, "STREAMS": streams}


def _even(size: int, most: int, tile: int) -> int:
    """Size of each of the fewest about equal parts of at most `most` (rounded up to whole tiles)."""
    parts = triton.cdiv(size, most)
    return triton.cdiv(triton.cdiv(size, parts), tile) * tile


def _ranks(row_keys: Tensor | None, col_keys: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Numbers of 32 bits that are equal where the keys are: they take half the registers."""
    if row_keys is None or col_keys is None:
        return None, None
    both = torch.cat([row_keys, col_keys])
    ranks = torch.searchsorted(both.sort().values, both, out_int32=True)
    return ranks[: len(row_keys)], ranks[len(row_keys) :].clone()


def side_terms(block: Block, padded: PaddedBlock, gradient_scale: Tensor, objective: Softmax) -> list[SideTerms]:
    """The terms of the rows and of the columns."""
    sides = (
        (block.rows, objective.total_cols, padded.tiles.rows),
        (block.cols, objective.total_rows, padded.tiles.cols),
    )
    tops = [side.lse.max() * padded.units for side, _, _ in sides if side.lse is not None and side.weight is not None]
    t, found = torch.stack(tops).max() - HEADROOM, []
    for side, count, size in sides:
        exact, weight = t.expand(len(side)), torch.zeros_like(t).expand(len(side))
        if side.lse is not None and side.weight is not None:
            exact, weight = side.lse.double() * padded.units, side.weight.double() * gradient_scale
        rounded, tiles = exact.float(), triton.cdiv(len(side), size)
        factor = (rounded.double() - t).exp2() if side is block.rows else weight * (t - exact).exp2()
        low = torch.nn.functional.pad(exact < t - HEADROOM, (0, tiles * size - len(side))).view(tiles, size).any(1)
        corrected, target, smoothing = (
            (weight * x).float()
            for x in ((rounded - exact).exp2(), 1 - objective.smoothing, objective.smoothing / count)
        )
        found.append(SideTerms(rounded, factor.float(), corrected, target, smoothing, low.to(torch.int8), size))
    return found
