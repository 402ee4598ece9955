"""Triton kernels of the sigmoid objective: the loss of a panel, and a panel of the gradient.

Letters: N rows (images) and M columns (texts) of the panel, D feature width; BM x BN the tile, BK the step along D.
The logits are l_ij = scale <u_i, v_j> + bias. Below they are negated at the positives, so that every pair's term is softplus(l).
"""

# mypy: disable-error-code="no-untyped-def"
# (the arguments of a kernel are Triton's pointers and numbers)

import triton
import triton.language as tl

from clipscale.loss.triton.tiles import crosses, left_out, quarters, summable, tile_dots, tile_position

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["n", "m", "positive"])
def sigmoid_loss_kernel(
    u, v, scale, bias, row_keys, col_keys, sums, n, m, depth, stride_u, stride_v, positive,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """sums[program] = the sum of softplus(l) over the tile."""
    tile_row, tile_col = tile_position(n, m, BM, BN, GROUP)
    first_row, first_col = tile_row * BM, tile_col * BN
    rows = first_row + tl.arange(0, BM)
    cols = first_col + tl.arange(0, BN)
    dots = tile_dots(u, v, tile_row, tile_col, n, m, depth, stride_u, stride_v, PRECISION, BM, BN, BK)
    logits = dots * tl.load(scale) + tl.load(bias)
    if crosses(first_row, first_col, positive, BM, BN):
        logits = tl.where(cols[None, :] == (rows + positive)[:, None], -logits, logits)
    terms = tl.maximum(logits, 0.0) + _log1p(tl.exp2(-tl.abs(logits) * LOG2E))
    if KEYS:
        terms = tl.where(left_out(rows, cols, n, m, row_keys, col_keys, positive), 0.0, terms)
    if (first_row + BM > n) | (first_col + BN > m):
        terms = tl.where((rows < n)[:, None] & (cols < m)[None, :], terms, 0.0)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(terms, axis=1), axis=0))


@triton.jit
def _log1p(x):
    """log(1 + x) for x in [0, 1], to 2e-7 relative. log of a rounded 1 + x is wrong by any factor where x is tiny, as SigLIP's terms are.

    x times a polynomial: the interpolant of log(1 + x) / x at ten Chebyshev nodes.
    """
    p = tl.full(x.shape, -0.0031760570527694654, tl.float32)
    p = p * x + 0.01954252743780671
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
def sigmoid_gradient_kernel(
    u, v, scale, bias, gradient_scale, row_keys, col_keys, panel, sums, products, n, m, depth, stride_u, stride_v, stride_panel, positive,
    STORE: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """panel (N, M rounded up to whole tiles) = gradient_scale * d softplus / d logit of one tile, zero past the end. sums[program] =
    the sum of the derivatives; products[program] = the sum of their products with <u_i, v_j>.

    The derivative is sigmoid(l), and -sigmoid(l) at the positives (where l is negated): nothing cancels. With STORE false only the
    two sums are written.
    """
    tile_row, tile_col = tile_position(n, m, BM, BN, GROUP)
    dots = tile_dots(u, v, tile_row, tile_col, n, m, depth, stride_u, stride_v, PRECISION, BM, BN, BK)
    scale_, bias_, gradient_scale_ = tl.load(scale), tl.load(bias), tl.load(gradient_scale)
    WIDTH: tl.constexpr = BN // 4
    parts = quarters(dots)
    sum_ = tl.zeros((BM,), dtype=tl.float32)
    product = tl.zeros((BM,), dtype=tl.float32)
    for part in tl.static_range(4):
        part_sum, part_product = _sigmoid_gradient_part(
            parts[part], scale_, bias_, gradient_scale_, tile_row * BM, tile_col * BN + part * WIDTH,
            row_keys, col_keys, panel, n, m, stride_panel, positive, STORE, KEYS,
        )  # fmt: skip
        sum_ += part_sum
        product += part_product
    tl.store(sums + tl.program_id(0), tl.sum(sum_, axis=0))
    tl.store(products + tl.program_id(0), tl.sum(product, axis=0))


@triton.jit
def _sigmoid_gradient_part(
    dots, scale, bias, gradient_scale, first_row, first_col, row_keys, col_keys, panel, n, m, stride_panel, positive,
    STORE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Store this part of the panel. Returns its row sums, (HEIGHT,), of the derivative and of its product with <u_i, v_j>."""
    HEIGHT: tl.constexpr = dots.shape[0]
    WIDTH: tl.constexpr = dots.shape[1]
    rows = first_row + tl.arange(0, HEIGHT)
    cols = first_col + tl.arange(0, WIDTH)
    logits = dots * scale + bias
    has_positive = crosses(first_row, first_col, positive, HEIGHT, WIDTH)
    if has_positive:
        logits = tl.where(cols[None, :] == (rows + positive)[:, None], -logits, logits)
    g = 1.0 / (1.0 + tl.exp2(-logits * LOG2E))
    if has_positive:
        g = tl.where(cols[None, :] == (rows + positive)[:, None], -g, g)
    if KEYS:
        g = tl.where(left_out(rows, cols, n, m, row_keys, col_keys, positive), 0.0, g)
    if (first_row + HEIGHT > n) | (first_col + WIDTH > m):
        g = tl.where((rows < n)[:, None] & (cols < m)[None, :], g, 0.0)
    if STORE:
        at = panel + rows.to(tl.int64)[:, None] * stride_panel + cols[None, :]
        tl.store(at, (g * gradient_scale).to(panel.dtype.element_ty))
    return tl.sum(g, axis=1), tl.sum(g * summable(dots, n), axis=1)
