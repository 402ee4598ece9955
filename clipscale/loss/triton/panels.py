"""A block cut into panels for the Triton kernels: checked and padded operands, running sums, launches, and the gradient's GEMMs.

Letters: n rows (images), m columns (texts) of the block or of a panel of it, D feature width.
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

from clipscale.loss.triton.softmax import merge_kernel
from clipscale.loss.triton.tuning import Tiles, arithmetic_of, tiles_on

LOG2E = 1 / math.log(2)
LARGEST_HALF = 2.0**14  # what the largest possible score gradient becomes in float16: a quarter of its range
MERGED_LINES, MERGED_WIDTH = 16, 128


@dataclass
class Panel:
    """Rows i.. and columns j.. of a block; tensors are views."""

    i: int
    j: int
    u: Tensor  # (n, D padded)
    v: Tensor  # (m, D padded)
    keys: tuple[Tensor | None, Tensor | None]
    positive: int  # column of the panel that is the positive of its first row; may lie outside

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
class Problem:
    """A block as the kernels take it."""

    u: Tensor  # (n, D padded to whole steps), rows aligned
    v: Tensor  # (m, D padded)
    width: int  # D
    scale: Tensor
    positive: int | None
    row_keys: Tensor | None
    col_keys: Tensor | None
    dtype: torch.dtype  # of the features
    arithmetic: str
    tiles: Tiles

    @classmethod
    def of(
        cls,
        u: Tensor,
        v: Tensor,
        scale: Tensor,
        positive: int | None,
        keys: tuple[Tensor | None, Tensor | None],
        fp32_precision: str,
        backward: bool,
    ) -> "Problem":
        """The block, checked. Raises ValueError."""
        if u.dim() != 2 or v.dim() != 2 or u.shape[1] != v.shape[1] or u.shape[1] == 0:
            raise ValueError(f"the features must be (n, D) and (m, D), not {tuple(u.shape)} and {tuple(v.shape)}")
        if u.dtype != v.dtype or u.device != v.device or u.device != scale.device:
            raise ValueError(
                f"the features must agree with each other and be where the scale is: u is {u.dtype} on {u.device}, "
                f"v {v.dtype} on {v.device}, the scale on {scale.device}"
            )
        if scale.dim() or scale.dtype != torch.float32:
            raise ValueError(f"the scale must be a 0-d float32 tensor, not {tuple(scale.shape)} {scale.dtype}")
        if (keys[0] is None) != (keys[1] is None):
            raise ValueError("row_keys and col_keys go together: give both or neither")
        for k, x in zip(keys, (u, v), strict=True):
            if k is not None and (k.dtype != torch.int64 or k.shape != x.shape[:1] or k.device != u.device):
                raise ValueError(
                    f"keys must be ({len(x)},) int64 on {u.device}, not {tuple(k.shape)} {k.dtype} on {k.device}"
                )
        arithmetic = arithmetic_of(u.dtype, fp32_precision)
        kernel_pass = ("backward" if backward else "forward") + ("" if keys[0] is None else " with keys")
        tiles = tiles_on(u.device, kernel_pass, arithmetic)
        row_keys, col_keys = (None if k is None else k.contiguous() for k in keys)
        rows, cols = _aligned(u, tiles.depth), _aligned(v, tiles.depth)
        return cls(rows, cols, u.shape[1], scale, positive, row_keys, col_keys, u.dtype, arithmetic, tiles)

    @cached_property
    def factor(self) -> Tensor:
        """The scale in units of log 2 as the softmax kernels use it, 0-d float32."""
        return (self.scale.double() * LOG2E).float()

    @cached_property
    def units(self) -> Tensor:
        """Units of the kernels' scores in a nat, 0-d float64: log2(e) up to the factor's rounding, whose part of a score it takes back."""
        return self.factor.double() / self.scale.double()

    def panels(self, height: int, width: int) -> Iterator[Panel]:
        """All panels of at most height x width, row by row."""
        for i in range(0, len(self.u), height):
            for j in range(0, len(self.v), width):
                u, v = self.u[i : i + height], self.v[j : j + width]
                row_keys = None if self.row_keys is None else self.row_keys[i : i + height]
                col_keys = None if self.col_keys is None else self.col_keys[j : j + width]
                # With no positive, one past the end: no row reaches it.
                yield Panel(
                    i, j, u, v, (row_keys, col_keys), len(v) if self.positive is None else self.positive + i - j
                )

    def panel_shape(self, area: int) -> tuple[int, int]:
        """Height and width, in whole tiles, of about equal panels of at most about `area`, as square as the block allows."""
        n, m = max(1, len(self.u)), max(1, len(self.v))
        height = min(n, max(math.isqrt(area), area // m, 1))
        width = min(m, max(area // height, 1))
        return _even(n, height, self.tiles.rows), _even(m, width, self.tiles.cols)

    def launch(self, kernel: Any, panel: Panel, *arguments: Any, **constants: Any) -> None:
        """Run the kernel on every tile of the panel."""
        t = self.tiles
        launch(
            kernel, self.grid(panel), self.u.device, t, *arguments, **constants, KEYS=self.row_keys is not None,
            PRECISION="tf32" if self.arithmetic == "tf32" else "ieee", BM=t.rows, BN=t.cols, BK=t.depth, GROUP=t.group,
        )  # fmt: skip

    def grid(self, panel: Panel) -> int:
        """Number of tiles."""
        return triton.cdiv(len(panel.u), self.tiles.rows) * triton.cdiv(len(panel.v), self.tiles.cols)


class RunningSum:
    """Sums of exponentials, total * 2^reference, of the n rows (or m columns) of a block."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.reference = torch.full((size,), -torch.inf, dtype=torch.float32, device=device)
        self.total = torch.zeros(size, dtype=torch.float32, device=device)

    def merge(self, where: slice, lines: int, references: Tensor, totals: Tensor) -> None:
        """Merge `lines` lines of partial sums (lines, entries of `where`) into the entries `where`, in their order."""
        reference, total = self.reference[where], self.total[where]
        arguments = (references, totals, reference, total, lines, len(total))
        grid = triton.cdiv(len(total), MERGED_WIDTH)
        launch(
            merge_kernel,
            grid,
            total.device,
            Tiles(0, 0, 0, warps=4, stages=2),
            *arguments,
            LINES=MERGED_LINES,
            WIDTH=MERGED_WIDTH,
        )

    def log(self, units: Tensor) -> Tensor:
        """The natural logarithms, float64."""
        return (self.reference.double() + self.total.double().log2()) / units


def launch(kernel: Any, grid: int, device: torch.device, tiles: Tiles, *arguments: Any, **constants: Any) -> None:
    """Run a kernel, or say which one failed, where, and why."""
    here = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        with here:
            kernel[(grid,)](
                *arguments, **constants, num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers, enable_fp_fusion=True
            )  # fmt: skip
    except Exception as error:
        name = getattr(kernel, "__name__", str(kernel))
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the interpreter"
        raise RuntimeError(
            f"the Triton kernel {name} failed on {where} with {tiles}: {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def accumulating(problem: Problem, bound: Tensor, d_u: Tensor | None, d_v: Tensor | None) -> Iterator[Tensor]:
    """What to multiply score gradients by, a 0-d tensor, before they are stored in the features' dtype: the scale; in float16, over a unit.

    bfloat16 and float32 have the range for any gradient. float16 does not: a weight of 1/2N is below its normal numbers from N = 8192
    on, before any probability, and a loss scaler's factor is above them. So there the gradients are stored in a unit, a power of two that
    brings `bound`, the largest that |scale G| can be, to 2^13..2^14, and d_u and d_v are brought to that unit, exactly, while products
    are added to them.
    """
    for d, x in ((d_u, problem.u), (d_v, problem.v)):
        if d is not None and (d.dtype != torch.float32 or d.shape != (len(x), problem.width)):
            raise ValueError(
                f"gradients are added into ({len(x)}, {problem.width}) float32, not {tuple(d.shape)} {d.dtype}"
            )
    gain = problem.scale
    wanted = [d for d in (d_u, d_v) if d is not None]
    if problem.dtype == torch.float16:
        exponent = torch.where(bound > 0, bound / LARGEST_HALF, 1.0).log2().ceil()
        unit = torch.exp2(exponent)
        gain = gain / unit
        for d in wanted:
            d.div_(unit)
    with _library_arithmetic(problem):
        yield gain
    if problem.dtype == torch.float16:
        for d in wanted:
            d.mul_(unit)


def add_products(problem: Problem, panel: Panel, scores: Tensor, d_u: Tensor | None, d_v: Tensor | None) -> None:
    """d_u += G V and d_v += G' U for the panel of score gradients at the start of `scores`."""
    g = scores[: len(panel.u), : len(panel.v)]
    if d_u is not None:
        _add_product(d_u[panel.rows], g, panel.v[:, : problem.width])
    if d_v is not None:
        _add_product(d_v[panel.cols], g.T, panel.u[:, : problem.width])


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    if a.device.type == "cpu":
        out.addmm_(a.float(), b.float())
    elif a.dtype == torch.float32:
        out.addmm_(a, b)
    else:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)


@contextlib.contextmanager
def _library_arithmetic(problem: Problem) -> Iterator[None]:
    """Autocast off, which would round float32 operands, and the asked-for precision of float32 GEMMs."""
    device = problem.u.device.type
    with torch.autocast(device, enabled=False):
        if device == "cpu" or problem.arithmetic == "half":
            yield
            return
        settings = torch.backends.cuda.matmul
        before, settings.fp32_precision = settings.fp32_precision, problem.arithmetic
        try:
            yield
        finally:
            settings.fp32_precision = before


def in_units(
    lse: Tensor | None, weight: Tensor | None, units: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(lse in the kernels' units, the weight times what rounding that does to the probabilities, the weight); all float32."""
    if lse is None or weight is None:
        return None, None, None
    exact = lse.double() * units
    rounded = exact.float()
    correction = (rounded - exact).nan_to_num(0.0).exp2()  # nan: -inf - -inf, a row with no pairs
    return rounded, (weight * correction).float(), weight.float().contiguous()


def _aligned(x: Tensor, depth: int) -> Tensor:
    """x (n, D) with its width a multiple of `depth` (zeros add nothing to a dot product) and rows that load 16 bytes at a time."""
    x = x.detach()
    if x.device.type == "cpu" and x.dtype == torch.bfloat16:
        x = x.float()  # Triton's interpreter multiplies bfloat16 by its bits; the products of the widened numbers are those of the hardware
    n, width = x.shape
    padded = triton.cdiv(width, depth) * depth
    if padded == width and x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    if padded == width:
        return x.clone(memory_format=torch.contiguous_format)
    out = x.new_zeros((n, padded))
    out[:, :width] = x
    return out


def _even(size: int, most: int, tile: int) -> int:
    """Size of each of the fewest about equal parts of at most `most` (rounded up to whole tiles)."""
    parts = triton.cdiv(size, most)
    return triton.cdiv(triton.cdiv(size, parts), tile) * tile
