"""The Triton kernel of the sigmoid objective: the loss and the score gradient of a panel, from one product; and the
backend that launches it.

Letters: N rows (images) and M columns (texts) of the panel, D feature width; BM x BN the tile, BK the step along D.
The logits are l_ij = scale <u_i, v_j> + bias. Below they are negated at the positives, so that every pair's term is
softplus(l).
"""

# mypy: disable-error-code="no-untyped-def"
# (the arguments of a kernel are Triton's pointers and numbers)

import torch
import triton
import triton.language as tl

from clipscale.loss.block import Block
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


@triton.jit
def log1p(x):
    """log(1 + x) for x in [0, 1], to 2e-7 relative. log of a rounded 1 + x is wrong by any factor for SigLIP's tiny x.

    x times a polynomial: the interpolant of log(1 + x) / x at ten Chebyshev nodes.
    """
    p = x * -0.0031760570527694654 + 0.01954252743780671
    p = p * x - 0.056373613209643736
    p = p * x + 0.10543623839523661
    p = p * x - 0.1526966710446648
    p = p * x + 0.19663274269437392
    p = p * x - 0.2495161626572585
    p = p * x + 0.33329710499262943
    p = p * x - 0.49999892648080163
    p = p * x + 0.9999999946562934
    return p * x


@triton.jit(do_not_specialize=["n", "m", "positive_offset"])
def sigmoid_kernel(
    u, v, scale, n, m, depth, stride_u, stride_v, positive_offset, panel, stride_panel, bias, sums,
    TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """panel (whole tiles) = GRAD_SCALE * G of one tile, zero past the end; G, N times the
    derivative of the loss, is sigmoid(l), and -sigmoid(l) at positives.

    sums (3, programs) = the tile's sum of softplus(l), of GRAD_SCALE * G, and of GRAD_SCALE * G_ij <u_i, v_j>.
    """
    tile_row, tile_col = tile_position(n, m, BM, BN)
    dots = tile_dots(u, v, tile_row, tile_col, n, m, depth, stride_u, stride_v, TMA, BM, BN, BK)
    scale_ = tl.load(scale)
    bias_ = tl.load(bias)
    rows = tile_row * BM + tl.arange(0, BM)
    WIDTH: tl.constexpr = BN // 4
    dots_by_quarter = quarters(dots)
    value = tl.zeros((BM,), tl.float32)
    total = value
    product = value
    for quarter in tl.static_range(4):
        first_col = tile_col * BN + quarter * WIDTH
        cols = first_col + tl.arange(0, WIDTH)
        logits = dots_by_quarter[quarter] * scale_ + bias_
        with_positives = has_positives(tile_row * BM, first_col, positive_offset, BM, WIDTH)
        if with_positives:
            logits = tl.where(is_positive(rows, cols, positive_offset), -logits, logits)
        logits = where_inside(logits, NEG_INF, rows, cols, n, m)
        small = tl.exp2(-tl.abs(logits) * LOG2E)
        value += tl.sum(tl.maximum(logits, 0.0) + log1p(small), axis=1)
        g = GRAD_SCALE * tl.where(logits >= 0, 1.0, small) / (1.0 + small)  # nothing cancels
        if with_positives:
            g = tl.where(is_positive(rows, cols, positive_offset), -g, g)
        store_quarter(panel, g, tile_row * BM, first_col, stride_panel, TMA)
        total += tl.sum(g, axis=1)
        product += tl.sum(g * dots_for_sum(dots_by_quarter[quarter], n), axis=1)
    out = sums + tl.program_id(0)
    count = tl.num_programs(0)
    tl.store(out, tl.sum(value, axis=0))
    tl.store(out + count, tl.sum(total, axis=0))
    tl.store(out + 2 * count, tl.sum(product, axis=0))


class TritonSigmoid(TritonBackend):
    """Runs the sigmoid's kernel: three matrix products (2 n m D FLOP each) for value and gradients, in one sweep."""

    def backward(self, block: Block) -> None:
        """Add the block's part of the loss to row 0's, since the kernel sums over tiles, not over rows.

        Add scale G V to the rows' gradient, scale G' U to the columns', sum_ij G_ij to the bias's and sum_ij G_ij
        <u_i, v_j> to the scale's.
        """
        parameters = block.parameters
        row_loss = block.rows.row_loss
        for panel, store in self.gradient_panels(block):
            sums = store.new_empty(3, self.programs(panel), dtype=torch.float32)
            self.launch(sigmoid_kernel, panel, parameters.scale, store, bias=parameters.bias, sums=sums)
            value, bias_grad, scale_grad = sums.sum(1, dtype=torch.float64).unbind()
            if row_loss is not None:
                row_loss[0] += value
            if parameters.bias_grad is not None:
                parameters.bias_grad += bias_grad / GRAD_SCALE.value
            parameters.add_scale_grad(scale_grad / GRAD_SCALE.value)
