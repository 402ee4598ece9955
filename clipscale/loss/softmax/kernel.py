"""Triton kernels of the softmax objective: log-sum-exps of a panel's sides, and a panel of the score gradient; and the
backend that launches them.

Scores are in units of log 2, y_ij = factor <u_i, v_j>, because exponentials of base 2 are what the hardware has. From
every exponent a shift is subtracted, close to the largest score of what is summed with it. So no sum loses a term that
matters, whatever the features are and even where the GPU flushes numbers below 2^-126 to zero. Shifts are whole
numbers, so 2 to the power of their difference is exact.

Letters: N rows (images) and M columns (texts) of the panel, D feature width; BM x BN the tile, BK the step along D.
"""

# mypy: disable-error-code="no-untyped-def"
# (the arguments of a kernel are Triton's pointers and numbers)

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from clipscale.loss.block import Block, BlockSide
from clipscale.loss.similarity import row_products
from clipscale.loss.softmax.tile import positive_weights
from clipscale.loss.triton.backend import TritonBackend
from clipscale.loss.triton.tiles import (
    GRAD_SCALE,
    LOG2E,
    NEG_INF,
    dots_for_sum,
    has_positives,
    is_positive,
    quarters,
    store_quarter,
    tile_dots,
    tile_position,
    where_inside,
)

# A sum of 2^(y - t) that is at least this large, with t at or above every y, has lost less than 2^-50 of itself to
# underflow.
MIN_SAFE_SUM = tl.constexpr(2.0**-60)


@triton.jit
def shift_above(top):
    """A whole number just above the largest score; 0 past the end, where there is no score."""
    return tl.where(top == NEG_INF, 0.0, tl.ceil(top))


@triton.jit(do_not_specialize=["n", "m"])
def lse_kernel(
    u, v, factor, n, m, depth, stride_u, stride_v, row_partials, col_partials,
    TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The shifts and the sums of 2^(y - shift) of one tile's rows, to row_partials (ceil(M / BN), 2, N), and of
    its columns, to col_partials (ceil(N / BM), 2, M).

    One exponential an element, relative to the tile's largest score, serves both sums. If a row's or a column's scores
    are so far below it that the sum underflows, all sums are computed again, each relative to its own largest score.
    """
    tile_row, tile_col = tile_position(n, m, BM, BN)
    rows = tile_row * BM + tl.arange(0, BM)
    cols = tile_col * BN + tl.arange(0, BN)
    dots = tile_dots(u, v, tile_row, tile_col, n, m, depth, stride_u, stride_v, TMA, BM, BN, BK)
    dots = where_inside(dots, NEG_INF, rows, cols, n, m)
    scale = tl.load(factor)
    top = shift_above(tl.max(tl.max(dots, axis=1), axis=0) * scale)
    # A quarter's column sums are stored before the next quarter's are taken: all at once they would spill.
    dots_by_quarter = quarters(dots)
    WIDTH: tl.constexpr = BN // 4
    row_sums = tl.zeros((BM,), tl.float32)
    lowest = tl.full((), 1.0, tl.float32)
    for quarter in tl.static_range(4):
        # The product is not rounded before the subtraction: at scale 100 that rounding alone would be 5e-6 of the
        # exponential.
        terms = tl.exp2(tl.fma(dots_by_quarter[quarter], scale, -top))
        row_sums += tl.sum(terms, axis=1)
        col_sums = tl.sum(terms, axis=0)
        lowest = tl.minimum(lowest, tl.min(col_sums, axis=0))
        first_col = tile_col * BN + quarter * WIDTH
        store_line(col_partials, top, col_sums, tile_row, first_col, m)
    store_line(row_partials, top, row_sums, tile_col, tile_row * BM, n)
    if tl.minimum(tl.min(row_sums, axis=0), lowest) < MIN_SAFE_SUM:
        tl.debug_barrier()  # these come after what the other threads have stored
        row_tops = shift_above(tl.max(dots, axis=1) * scale)
        row_sums = tl.sum(tl.exp2(tl.fma(dots, scale, -row_tops[:, None])), axis=1)
        store_line(row_partials, row_tops, row_sums, tile_col, tile_row * BM, n)
        for quarter in tl.static_range(4):
            col_tops = shift_above(tl.max(dots_by_quarter[quarter], axis=0) * scale)
            col_sums = tl.sum(tl.exp2(tl.fma(dots_by_quarter[quarter], scale, -col_tops[None, :])), axis=0)
            store_line(col_partials, col_tops, col_sums, tile_row, tile_col * BN + quarter * WIDTH, m)


@triton.jit
def store_line(partials, tops, sums, line, first, size):
    """Write shifts (or one for all) and sums from number `first` on to a line of partials (lines, 2, size)."""
    indices = first + tl.arange(0, sums.shape[0])
    pointer = partials + 2 * line.to(tl.int64) * size + indices
    tl.store(pointer, tops, mask=indices < size)
    tl.store(pointer + size, sums, mask=indices < size)


@triton.jit(do_not_specialize=["n", "m", "positive_offset"])
def softmax_gradient_kernel(
    u, v, factor, n, m, depth, stride_u, stride_v, positive_offset,
    panel, stride_panel, row_lse, col_lse, row_weight, col_weight, row_positive, col_positive, products,
    TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """panel (N and M rounded up to whole tiles) = GRAD_SCALE * G of one tile, zero past the end, from recomputed
    scores:

        G_ij = a_i 2^(y_ij - r_i) + b_j 2^(y_ij - c_j) - (a_i + b_j) [j = positive_offset + i]

    with the complete log-sum-exps r and c. G is N times the derivative of the loss, as in loss/tile.py. The arguments
    bring the factor GRAD_SCALE: row_weight and col_weight are a and b times it, corrected for the rounding of r and c;
    row_positive and col_positive are a and b times it, exact, for the last term.
    products (programs,) = the tile's sum of GRAD_SCALE * G_ij <u_i, v_j>, before G is rounded to the panel's type. No
    exponential inside the panel overflows, as y_ij <= r_i and y_ij <= c_j.
    """
    tile_row, tile_col = tile_position(n, m, BM, BN)
    dots = tile_dots(u, v, tile_row, tile_col, n, m, depth, stride_u, stride_v, TMA, BM, BN, BK)
    scale = tl.load(factor)
    rows = tile_row * BM + tl.arange(0, BM)
    row_at = tl.minimum(rows, n - 1)
    r = tl.load(row_lse + row_at)
    a = tl.load(row_weight + row_at)
    WIDTH: tl.constexpr = BN // 4
    dots_by_quarter = quarters(dots)
    product = tl.zeros((BM,), tl.float32)
    for quarter in tl.static_range(4):
        first_col = tile_col * BN + quarter * WIDTH
        cols = first_col + tl.arange(0, WIDTH)
        col_at = tl.minimum(cols, m - 1)
        c = tl.load(col_lse + col_at)
        b = tl.load(col_weight + col_at)
        g = a[:, None] * tl.exp2(tl.fma(dots_by_quarter[quarter], scale, -r[:, None]))
        g += b[None, :] * tl.exp2(tl.fma(dots_by_quarter[quarter], scale, -c[None, :]))
        # Late in training a positive's probabilities are near 1, and the gradient is what this subtraction leaves.
        if has_positives(tile_row * BM, first_col, positive_offset, BM, WIDTH):
            weight = tl.load(row_positive + row_at)[:, None] + tl.load(col_positive + col_at)[None, :]
            g = tl.where(is_positive(rows, cols, positive_offset), g - weight, g)
        g = where_inside(g, 0.0, rows, cols, n, m)
        store_quarter(panel, g, tile_row * BM, first_col, stride_panel, TMA)
        product += tl.sum(g * dots_for_sum(dots_by_quarter[quarter], n), axis=1)
    tl.store(products + tl.program_id(0), tl.sum(product, axis=0))


@triton.jit(do_not_specialize=["lines", "n"])
def join_kernel(partials, lse, lines, n, BLOCK: tl.constexpr):
    """lse (N,) float64: the log-sum-exps, in units of log 2, of lse_kernel's partials (lines, 2, N), each read once.

    float64, since float32 would round a value near 100 by 4e-6, and with it every probability of that row.
    """
    indices = tl.minimum(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), n - 1)
    top = tl.load(partials + indices)
    total = tl.zeros((BLOCK,), tl.float64)
    for line in tl.range(lines, num_stages=4):
        pointer = partials + 2 * line * n + indices
        shift = tl.load(pointer)
        terms = tl.load(pointer + n)
        largest = tl.maximum(top, shift)
        total = total * tl.exp2(top - largest) + terms * tl.exp2(shift - largest)
        top = largest
    tl.store(lse + indices, tl.log2(total) + top)


def log2_factor(scale: Tensor) -> tuple[Tensor, Tensor]:
    """scale log2(e), float32, and a nat in these units, float64, which corrects for the rounding of the first."""
    exact = scale.double()
    factor = (exact * LOG2E.value).float()
    return factor, factor.double() / exact


def to_log2(side: BlockSide, nat: Tensor) -> BlockSide:
    """The side as the gradient kernel takes it, float32: log-sum-exps in units of log 2; `lse_weight`, corrected for
    their rounding; `positive_weight`, the weights as they are. Both are times GRAD_SCALE, and 0 without a softmax in
    this direction.
    """
    if side.lse_weight is None or side.lse is None:
        nothing = side.features.new_zeros(len(side), dtype=torch.float32)
        return replace(side, lse=nothing + torch.inf, lse_weight=nothing, positive_weight=nothing)
    exact = side.lse * nat
    rounded = exact.float()
    weight = side.lse_weight * GRAD_SCALE.value * (rounded - exact).exp2()
    return replace(side, lse=rounded, lse_weight=weight.float(), positive_weight=side.lse_weight * GRAD_SCALE.value)


class TritonSoftmax(TritonBackend):
    """Runs the softmax's kernels: one matrix product (2 n m D FLOP) in the forward pass, three in the backward pass."""

    def forward(self, block: Block) -> None:
        """Merge the block into the log-sum-exps, by the kernel, and its positives into `row_loss`."""
        features = block.rows.features
        scale = block.parameters.scale
        factor, nat = log2_factor(scale)
        t = self.tiles
        # Two numbers of four bytes a row of a tile (shift and sum), and two a column.
        area = self.runtime.max_partial_bytes // 8 * t.rows * t.cols // (t.rows + t.cols)
        for panel in self.panels(block, area):
            n = len(panel.rows)
            m = len(panel.cols)
            row_partials = torch.empty(triton.cdiv(m, t.cols), 2, n, device=features.device)
            col_partials = torch.empty(triton.cdiv(n, t.rows), 2, m, device=features.device)
            self.launch(lse_kernel, panel, factor, row_partials=row_partials, col_partials=col_partials)
            for side, partials in ((panel.rows, row_partials), (panel.cols, col_partials)):
                if side.lse is not None:
                    lse = torch.empty_like(side.lse)
                    self.runtime.launch(
                        join_kernel, triton.cdiv(len(side), 128), lse.device,
                        partials, lse, len(partials), len(side), BLOCK=128,
                    )  # fmt: skip
                    torch.logaddexp(side.lse, lse / nat, out=side.lse)
        diagonal = block.positive_diagonal()
        if diagonal is not None:
            i, j = diagonal
            assert block.rows.row_loss is not None
            weight = positive_weights(block, i, j)
            products = row_products(features[i], block.cols.features[j], self.runtime.tiles_to_run)
            block.rows.row_loss[i] -= weight * (scale * products)

    def backward(self, block: Block) -> None:
        """Add scale G V to the rows' gradient, scale G' U to the columns', sum_ij G_ij <u_i, v_j> to the scale's."""
        factor, nat = log2_factor(block.parameters.scale)
        block = replace(block, rows=to_log2(block.rows, nat), cols=to_log2(block.cols, nat))
        for panel, store in self.gradient_panels(block):
            products = store.new_empty(self.programs(panel), dtype=torch.float32)
            rows = panel.rows
            cols = panel.cols
            self.launch(
                softmax_gradient_kernel, panel, factor, store, products=products, row_lse=rows.lse, col_lse=cols.lse,
                row_weight=rows.lse_weight, col_weight=cols.lse_weight,
                row_positive=rows.positive_weight, col_positive=cols.positive_weight,
            )  # fmt: skip
            block.parameters.add_scale_grad(products.sum(dtype=torch.float64) / GRAD_SCALE.value)
