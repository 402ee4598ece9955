"""The Triton kernel of the sigmoid objective: the loss of a panel, a panel of the gradient, or both.

Letters: N rows (images) and M columns (texts) of the panel, D feature width; BM x BN the tile, BK the step along D.
The logits are l_ij = scale <u_i, v_j> + bias. Below they are negated at the positives, so that every pair's term is softplus(l).
"""

# mypy: disable-error-code="no-untyped-def"
# (the arguments of a kernel are Triton's pointers and numbers)

import triton
import triton.language as tl

from clipscale.loss.triton.tiles import crosses, left_out, quarters, store_part, summable, tile_dots, tile_position

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def signed_logits(dots, scale, bias, first_row, first_col, rows, cols, n, m, positive):
    """l of these rows and columns; -inf past the end."""
    logits = dots * scale + bias
    if crosses(first_row, first_col, positive, dots.shape[0], dots.shape[1]):
        logits = tl.where(cols[None, :] == (rows + positive)[:, None], -logits, logits)
    if (first_row + dots.shape[0] > n) | (first_col + dots.shape[1] > m):
        logits = tl.where((rows < n)[:, None] & (cols < m)[None, :], logits, NOTHING)
    return logits


@triton.jit
def softplus(logits, small):
    """log(1 + e^l), where small is e^-|l|."""
    return tl.maximum(logits, 0.0) + _log1p(small)


@triton.jit
def derivatives(logits, small, first_row, first_col, rows, cols, positive):
    """sigmoid(l), and -sigmoid(l) at the positives (where l is negated): nothing cancels."""
    g = tl.where(logits >= 0, 1.0, small) / (1.0 + small)
    if crosses(first_row, first_col, positive, logits.shape[0], logits.shape[1]):
        g = tl.where(cols[None, :] == (rows + positive)[:, None], -g, g)
    return g


@triton.jit
def _log1p(x):
    """log(1 + x) for x in [0, 1], to 2e-7 relative. log of a rounded 1 + x is wrong by any factor where x is tiny, as SigLIP's terms are.

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


@triton.jit(do_not_specialize=["n", "m", "positive"])
def sigmoid_kernel(
    u, v, scale, bias, gradient_scale, row_keys, col_keys, panel, values, sums, products,
    n, m, depth, stride_u, stride_v, stride_panel, positive,
    VALUE: tl.constexpr, GRADIENT: tl.constexpr, STORE: tl.constexpr, KEYS: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """With VALUE, values[program] = the sum of softplus(l) over the tile.

    With GRADIENT, sums[program] = the sum of its derivative in the logits, products[program] = the sum of the derivative's products with
    <u_i, v_j>, and with STORE panel (N, M rounded up to whole tiles) = gradient_scale * the derivative, zero past the end.
    """
    tile_row, tile_col = tile_position(n, m, BM, BN, GROUP)
    dots = tile_dots(u, v, tile_row, tile_col, n, m, depth, stride_u, stride_v, TMA, PRECISION, BM, BN, BK)
    scale_, bias_, gradient_scale_ = tl.load(scale), tl.load(bias), tl.load(gradient_scale)
    WIDTH: tl.constexpr = BN // 4
    parts = quarters(dots)
    value = tl.zeros((BM,), dtype=tl.float32)
    sum_ = tl.zeros((BM,), dtype=tl.float32)
    product = tl.zeros((BM,), dtype=tl.float32)
    first_row = tile_row * BM
    rows = first_row + tl.arange(0, BM)
    for part in tl.static_range(4):
        first_col = tile_col * BN + part * WIDTH
        cols = first_col + tl.arange(0, WIDTH)
        logits = signed_logits(parts[part], scale_, bias_, first_row, first_col, rows, cols, n, m, positive)
        if KEYS:
            logits = tl.where(left_out(rows, cols, n, m, row_keys, col_keys, positive), NOTHING, logits)
        small = tl.exp2(-tl.abs(logits) * LOG2E)
        if VALUE:
            value += tl.sum(softplus(logits, small), axis=1)
        if GRADIENT:
            g = derivatives(logits, small, first_row, first_col, rows, cols, positive)
            if STORE:
                store_part(panel, g * gradient_scale_, first_row, first_col, stride_panel, TMA)
            sum_ += tl.sum(g, axis=1)
            product += tl.sum(g * summable(parts[part], n), axis=1)
    program = tl.program_id(0)
    if VALUE:
        tl.store(values + program, tl.sum(value, axis=0))
    if GRADIENT:
        tl.store(sums + program, tl.sum(sum_, axis=0))
        tl.store(products + program, tl.sum(product, axis=0))
