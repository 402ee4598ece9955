"""The dot product's block functions on Triton: log-sum-exps and gradients of one block, in memory linear in its rows and columns.

A block is worked through in panels, rectangles of bounded area: the forward kernels leave partial sums of a panel's tiles, merged in a
fixed order; the backward kernels leave a panel of the gradient with respect to the scores, from which the GEMM library adds to both
sides' gradients in float32. No atomics: the same inputs give the same bits (as far as the GEMM library keeps to that on one stream).

Letters: n rows (images), m columns (texts), D feature width. x_ij = scale <u_i, v_j>. In all functions

    u (n, D), v (m, D)      bfloat16, float16 or float32, both the same; any strides
    scale, bias             0-d float32 on the same device; scale must be positive (it is not looked at: that would synchronise)
    positive                the column of row 0's positive; row i has its positive in column positive + i, which may lie outside of the
                            block; None: the block holds none
    row_keys, col_keys      (n,), (m,) int64 or both None: a pair that is no positive and whose keys agree is left out
    fp32_precision          "ieee" or "tf32", for float32 features. TF32 keeps 10 bits of each operand.

ValueError for dtypes, shapes and devices that do not fit; RuntimeError with the reason where a kernel cannot be compiled or launched.
"""

import torch
import triton
from torch import Tensor

from clipscale.loss.triton.panels import Problem, RunningSum, accumulating, add_products, in_units
from clipscale.loss.triton.sigmoid import sigmoid_gradient_kernel, sigmoid_loss_kernel
from clipscale.loss.triton.softmax import lse_kernel, softmax_gradient_kernel

# Of partial sums at a time: a 32k x 32k panel with 128 x 128 tiles.
PARTIAL_BYTES = 128 << 20
# Of score gradients at a time: a 16k x 16k panel in half precision, which keeps the library's GEMMs large.
PANEL_BYTES = 512 << 20


def lse_block(
    u: Tensor,
    v: Tensor,
    scale: Tensor,
    *,
    positive: int | None,
    row_keys: Tensor | None = None,
    col_keys: Tensor | None = None,
    want_rows: bool = True,
    want_cols: bool = True,
    fp32_precision: str = "ieee",
) -> tuple[Tensor | None, Tensor | None]:
    """Row log-sum-exps (n,) and column log-sum-exps (m,) of the block's scores; None for one that is not wanted.

    float64, because float32 rounds a value near 100 by 4e-6, and with it every probability of that row. -inf where every pair is left
    out. One matmul unit (2 n m D FLOP), however many of the two are wanted.
    """
    block = Problem.of(u, v, scale, positive, (row_keys, col_keys), fp32_precision, backward=False)
    t = block.tiles
    rows = RunningSum(len(u), u.device) if want_rows else None
    cols = RunningSum(len(v), u.device) if want_cols else None
    height, width = block.panel_shape(PARTIAL_BYTES * t.rows * t.cols // (8 * (t.rows + t.cols)))
    row_parts = [
        torch.empty(triton.cdiv(width, t.cols) * height if want_rows else 0, device=u.device) for _ in range(2)
    ]
    col_parts = [
        torch.empty(triton.cdiv(height, t.rows) * width if want_cols else 0, device=u.device) for _ in range(2)
    ]
    for panel in block.panels(height, width):
        block.launch(
            lse_kernel, panel, panel.u, panel.v, block.factor, *panel.keys, *row_parts, *col_parts, *panel.sizes, panel.positive,
            ROWS=want_rows, COLS=want_cols,
        )  # fmt: skip
        if rows is not None:
            rows.merge(panel.rows, triton.cdiv(len(panel.v), t.cols), *row_parts)
        if cols is not None:
            cols.merge(panel.cols, triton.cdiv(len(panel.u), t.rows), *col_parts)
    return None if rows is None else rows.log(block.units), None if cols is None else cols.log(block.units)


def add_softmax_gradient_block(
    u: Tensor,
    v: Tensor,
    scale: Tensor,
    row_lse: Tensor | None,
    col_lse: Tensor | None,
    row_weight: Tensor | None,
    col_weight: Tensor | None,
    *,
    positive: int | None,
    row_keys: Tensor | None = None,
    col_keys: Tensor | None = None,
    smoothing: tuple[float, float] = (0.0, 0.0),
    epsilon: float = 0.0,
    d_u: Tensor | None,
    d_v: Tensor | None,
    fp32_precision: str = "ieee",
) -> Tensor:
    """Add scale * G V to d_u (n, D) and scale * G' U to d_v (m, D), float32, in place, where not None; return the gradient of the
    scale, sum_ij G_ij <u_i, v_j>, 0-d float64.

        G_ij = a_i exp(x_ij - r_i) + b_j exp(x_ij - c_j) - a_i row_constant - b_j col_constant - (1 - epsilon) (a_i + b_j) [j positive of i]

    and 0 for a pair left out, with r, c the complete log-sum-exps (n,), (m,), float64 or float32, and a, b the weights (n,), (m,). A
    direction whose lse is None has weight zero. smoothing is (row_constant, col_constant): label smoothing `epsilon` over N rows
    and M columns in all is (epsilon / M, epsilon / N).
    One matmul unit for the scores and one for each side wanted.
    """
    row_weight, col_weight = (
        None if lse is None else weight for lse, weight in ((row_lse, row_weight), (col_lse, col_weight))
    )
    total = torch.zeros((), dtype=torch.float64, device=u.device)
    if (row_weight is None and col_weight is None) or not len(u) or not len(v):
        return total
    block = Problem.of(u, v, scale, positive, (row_keys, col_keys), fp32_precision, backward=True)
    rows, cols = in_units(row_lse, row_weight, block.units), in_units(col_lse, col_weight, block.units)
    store = d_u is not None or d_v is not None
    scores = _score_gradients(block)
    with accumulating(block, scale * (_largest(row_weight) + _largest(col_weight)), d_u, d_v) as gain:
        for panel in block.panels(*scores.shape):
            r, row_share, a = (None if x is None else x[panel.rows] for x in rows)
            c, col_share, b = (None if x is None else x[panel.cols] for x in cols)
            sums = torch.empty(block.grid(panel), device=u.device)
            block.launch(
                softmax_gradient_kernel, panel, panel.u, panel.v, block.factor, gain, r, c, row_share, col_share, a, b, *panel.keys, scores,
                sums, *panel.sizes, scores.stride(0), panel.positive, 1.0 - epsilon, *smoothing,
                ROWS=r is not None, COLS=c is not None, SMOOTH=any(smoothing), STORE=store,
            )  # fmt: skip
            add_products(block, panel, scores, d_u, d_v)
            total += sums.sum(dtype=torch.float64)
        return total / gain.double()


def sigmoid_loss_block(
    u: Tensor,
    v: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    positive: int | None,
    row_keys: Tensor | None = None,
    col_keys: Tensor | None = None,
    fp32_precision: str = "ieee",
) -> Tensor:
    """Sum over the pairs that count of softplus(-z_ij (x_ij + bias)), z = 1 at positives and -1 elsewhere: 0-d float32.

    Tiles are summed in float32, their sums in float64.
    """
    block = Problem.of(u, v, scale, positive, (row_keys, col_keys), fp32_precision, backward=False)
    total = torch.zeros((), dtype=torch.float64, device=u.device)
    for panel in block.panels(*block.panel_shape(PARTIAL_BYTES // 4 * block.tiles.rows * block.tiles.cols)):
        sums = torch.empty(block.grid(panel), device=u.device)
        block.launch(
            sigmoid_loss_kernel, panel, panel.u, panel.v, scale, bias, *panel.keys, sums, *panel.sizes, panel.positive
        )
        total += sums.sum(dtype=torch.float64)
    return total.float()


def add_sigmoid_gradient_block(
    u: Tensor,
    v: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    positive: int | None,
    row_keys: Tensor | None = None,
    col_keys: Tensor | None = None,
    d_u: Tensor | None,
    d_v: Tensor | None,
    fp32_precision: str = "ieee",
) -> tuple[Tensor, Tensor]:
    """Add scale * G V to d_u (n, D) and scale * G' U to d_v (m, D), float32, in place, where not None; return the gradients of the bias,
    sum_ij G_ij, and of the scale, sum_ij G_ij <u_i, v_j>, 0-d float64.

    G_ij = sigmoid(x_ij + bias), at positives -sigmoid(-(x_ij + bias)), 0 for a pair left out.
    """
    block = Problem.of(u, v, scale, positive, (row_keys, col_keys), fp32_precision, backward=True)
    totals = torch.zeros(2, dtype=torch.float64, device=u.device)
    store = d_u is not None or d_v is not None
    scores = _score_gradients(block)
    with accumulating(block, scale, d_u, d_v) as gain:
        for panel in block.panels(*scores.shape):
            sums = torch.empty(2, block.grid(panel), device=u.device)
            block.launch(
                sigmoid_gradient_kernel, panel, panel.u, panel.v, scale, bias, gain, *panel.keys, scores, *sums,
                *panel.sizes, scores.stride(0), panel.positive,
                STORE=store,
            )  # fmt: skip
            add_products(block, panel, scores, d_u, d_v)
            totals += sums.sum(1, dtype=torch.float64)
    bias_grad, scale_grad = totals
    return bias_grad, scale_grad


def _score_gradients(block: Problem) -> Tensor:
    """Memory for a panel of score gradients, of the shape that panels then have: whole tiles, so that no store needs a mask."""
    return torch.empty(block.panel_shape(PANEL_BYTES // block.dtype.itemsize), dtype=block.dtype, device=block.u.device)


def _largest(weight: Tensor | None) -> Tensor | float:
    return 0.0 if weight is None else weight.abs().amax()
