"""Triton kernels of the softmax objective: partial log-sum-exps of a panel's tiles, their merge, and a panel of the gradient.

Scores are in units of log 2: y_ij = factor <u_i, v_j> with factor = scale log2(e), rounded to float32 by the launcher, which corrects for
that rounding. A sum of exponentials is a pair (reference, total) that stands for total * 2^reference, so no kernel takes a logarithm.

Letters: N rows (images) and M columns (texts) of the panel, D feature width; BM x BN the tile, BK the step along D.
"""

# mypy: disable-error-code="no-untyped-def"
# (the arguments of a kernel are Triton's pointers and numbers)

import triton
import triton.language as tl

from clipscale.loss.triton.tiles import crosses, left_out, quarters, summable, tile_dots, tile_position

NOTHING = tl.constexpr(float("-inf"))
# Smallest total of a column, relative to the tile's largest score. Terms below 2^-126 are lost; above this floor 256 lost terms
# are under 2^-24 of the total.
SMALLEST_TOTAL = tl.constexpr(2.0**-94)
# Largest spread of the log-sum-exps of a tile (in units of log 2) for one common reference in its middle: no probability above 2^-60
# underflows and nothing overflows.
WIDEST_SPREAD = tl.constexpr(120.0)


@triton.jit(do_not_specialize=["n", "m", "positive"])
def lse_kernel(
    u, v, factor, row_keys, col_keys, row_reference, row_total, col_reference, col_total, n, m, depth, stride_u, stride_v, positive,
    ROWS: tl.constexpr, COLS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The sum of exponentials of every row and of every column of one tile: one matmul and one exponential an element.

    Out: row_* (ceil(M / BN), N), one line per tile column; col_* (ceil(N / BM), M), one line per tile row. Each number is written once.

    A row's reference is its own largest score, so rows are safe at any scale. The columns reuse the rows' exponentials, with a factor
    per row that makes the tile's largest score their reference. Where a column is so far below it that terms may have underflowed, the
    whole tile does a second matmul with a reference per column (a uniform branch; rare: at scale 100, a near-duplicate pair among low
    cosines).
    """
    tile_row, tile_col = tile_position(n, m, BM, BN, GROUP)
    rows = tile_row * BM + tl.arange(0, BM)
    cols = tile_col * BN + tl.arange(0, BN)
    factor_ = tl.load(factor)
    dots = _valid_dots(
        u, v, row_keys, col_keys, tile_row, tile_col, n, m, depth, stride_u, stride_v, positive, KEYS, PRECISION, BM, BN, BK,
    )  # fmt: skip
    row_top = tl.max(dots, axis=1) * factor_
    row_base = tl.where(row_top == NOTHING, 0.0, row_top)
    # The product is not rounded before the subtraction: at scale 100 that rounding alone would be 5e-6 of the exponential.
    exponentials = tl.exp2(tl.fma(dots, factor_, -row_base[:, None]))
    if ROWS:
        line = tile_col.to(tl.int64) * n
        tl.store(row_reference + line + rows, row_top, mask=rows < n)
        tl.store(row_total + line + rows, tl.sum(exponentials, axis=1), mask=rows < n)
    if COLS:
        line = tile_row.to(tl.int64) * m
        top = tl.max(row_top, axis=0)
        base = tl.where(top == NOTHING, 0.0, top)
        total = tl.sum(exponentials * tl.exp2(row_top - base)[:, None], axis=0)
        if tl.min(tl.where(cols < m, total, 1.0), axis=0) < SMALLEST_TOTAL:
            dots = _valid_dots(
                u, v, row_keys, col_keys, tile_row, tile_col, n, m, depth, stride_u, stride_v, positive, KEYS, PRECISION, BM, BN, BK,
            )  # fmt: skip
            col_top = tl.max(dots, axis=0) * factor_
            col_base = tl.where(col_top == NOTHING, 0.0, col_top)
            total = tl.sum(tl.exp2(tl.fma(dots, factor_, -col_base[None, :])), axis=0)
            tl.store(col_reference + line + cols, col_top, mask=cols < m)
        else:
            tl.store(col_reference + line + cols, top, mask=cols < m)
        tl.store(col_total + line + cols, total, mask=cols < m)


@triton.jit
def _valid_dots(
    u, v, row_keys, col_keys, tile_row, tile_col, n, m, depth, stride_u, stride_v, positive,
    KEYS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The tile's dot products, -inf where a pair is left out or past the end."""
    dots = tile_dots(u, v, tile_row, tile_col, n, m, depth, stride_u, stride_v, PRECISION, BM, BN, BK)
    rows = tile_row * BM + tl.arange(0, BM)
    cols = tile_col * BN + tl.arange(0, BN)
    if KEYS:
        dots = tl.where(left_out(rows, cols, n, m, row_keys, col_keys, positive), NOTHING, dots)
    if (tile_row * BM + BM > n) | (tile_col * BN + BN > m):
        dots = tl.where((rows < n)[:, None] & (cols < m)[None, :], dots, NOTHING)
    return dots


@triton.jit(do_not_specialize=["lines", "length"])
def merge_kernel(references, totals, reference, total, lines, length, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """Merge `lines` pairs (references, totals), each (lines, length), into the running pair (reference, total), each (length,)."""
    where = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = where < length
    base = tl.load(reference + where, mask=inside, other=NOTHING)
    sum_ = tl.load(total + where, mask=inside, other=0.0)
    for start in range(0, lines, LINES):
        line = start + tl.arange(0, LINES)
        at = line.to(tl.int64)[:, None] * length + where[None, :]
        mask = (line < lines)[:, None] & inside[None, :]
        bases = tl.load(references + at, mask=mask, other=NOTHING)
        sums = tl.load(totals + at, mask=mask, other=0.0)
        top = tl.maximum(base, tl.max(bases, axis=0))
        finite = tl.where(top == NOTHING, 0.0, top)
        sum_ = sum_ * tl.exp2(base - finite) + tl.sum(sums * tl.exp2(bases - finite[None, :]), axis=0)
        base = top
    tl.store(reference + where, base, mask=inside)
    tl.store(total + where, sum_, mask=inside)


@triton.jit(do_not_specialize=["n", "m", "positive"])
def softmax_gradient_kernel(
    u, v, factor, gradient_scale, row_lse, col_lse, row_corrected, col_corrected, row_weight, col_weight, row_keys, col_keys, panel, sums,
    n, m, depth, stride_u, stride_v, stride_panel, positive, hard_target, row_constant, col_constant,
    ROWS: tl.constexpr, COLS: tl.constexpr, SMOOTH: tl.constexpr, STORE: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """panel (N, M rounded up to whole tiles) = gradient_scale * G of one tile, zero past the end, from recomputed scores. sums[program] =
    the tile's sum of gradient_scale * G_ij <u_i, v_j>, before the panel's precision rounds it. With STORE false only the sum is written.

        G_ij = a'_i 2^(y_ij - r_i) + b'_j 2^(y_ij - c_j)
               - a_i (row_constant + hard_target [j = positive + i]) - b_j (col_constant + hard_target [j = positive + i])

    r, c are in units of log 2, rounded to float32; the weights a', b' (row_corrected, col_corrected) correct for that rounding. Both
    probabilities come from one exponential, 2^(y - t) (a'_i 2^(t - r_i) + b'_j 2^(t - c_j)), with t midway between the tile's extreme
    log-sum-exps. As y_ij <= min(r_i, c_j), this is safe for any scores. Where the extremes are too far apart the tile takes two
    exponentials. So do the few parts that hold positives: late in training their probabilities are near 1 and cancel against the
    weights, and an exponent t - r_i far from 0 would round away what is left.
    """
    tile_row, tile_col = tile_position(n, m, BM, BN, GROUP)
    rows = tile_row * BM + tl.arange(0, BM)
    row_at = tl.minimum(rows, n - 1)
    col_at = tl.minimum(tile_col * BN + tl.arange(0, BN), m - 1)
    dots = tile_dots(u, v, tile_row, tile_col, n, m, depth, stride_u, stride_v, PRECISION, BM, BN, BK)
    factor_, gradient_scale_ = tl.load(factor), tl.load(gradient_scale)
    none = tl.zeros((BM,), dtype=tl.float32)
    r, corrected, weight = none, none, none
    reference, narrow = 0.0, True
    if ROWS:
        r = tl.load(row_lse + row_at)
        corrected = tl.load(row_corrected + row_at) * gradient_scale_
        weight = tl.load(row_weight + row_at) * gradient_scale_
    if ROWS and COLS:
        c = tl.load(col_lse + col_at)
        highest = tl.maximum(tl.max(r, axis=0), tl.max(c, axis=0))
        lowest = tl.minimum(tl.min(r, axis=0), tl.min(c, axis=0))
        reference = 0.5 * (highest + lowest)
        narrow = highest - lowest <= WIDEST_SPREAD
    WIDTH: tl.constexpr = BN // 4
    parts = quarters(dots)
    products = none
    for part in tl.static_range(4):
        products += _softmax_gradient_part(
            parts[part], factor_, gradient_scale_, tile_row * BM, tile_col * BN + part * WIDTH, r, corrected, weight, reference, narrow,
            col_lse, col_corrected, col_weight, row_keys, col_keys, panel, n, m, stride_panel, positive, hard_target,
            row_constant, col_constant,
            ROWS, COLS, SMOOTH, STORE, KEYS,
        )  # fmt: skip
    tl.store(sums + tl.program_id(0), tl.sum(products, axis=0))


@triton.jit
def _softmax_gradient_part(
    dots, factor, gradient_scale, first_row, first_col, r, row_corrected, row_weight, reference, narrow,
    col_lse, col_corrected, col_weight, row_keys, col_keys, panel, n, m, stride_panel, positive, hard_target, row_constant, col_constant,
    ROWS: tl.constexpr, COLS: tl.constexpr, SMOOTH: tl.constexpr, STORE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Store this part of the panel. Returns its row sums of gradient_scale * G_ij <u_i, v_j>, (HEIGHT,)."""
    HEIGHT: tl.constexpr = dots.shape[0]
    WIDTH: tl.constexpr = dots.shape[1]
    rows = first_row + tl.arange(0, HEIGHT)
    cols = first_col + tl.arange(0, WIDTH)
    none = tl.zeros((WIDTH,), dtype=tl.float32)
    c, col_corrected_, col_weight_ = none, none, none
    if COLS:
        col_at = tl.minimum(cols, m - 1)
        c = tl.load(col_lse + col_at)
        col_corrected_ = tl.load(col_corrected + col_at) * gradient_scale
        col_weight_ = tl.load(col_weight + col_at) * gradient_scale
    has_positive = crosses(first_row, first_col, positive, HEIGHT, WIDTH)
    if ROWS and COLS:
        if narrow & (has_positive == 0):
            both = (row_corrected * tl.exp2(reference - r))[:, None] + (col_corrected_ * tl.exp2(reference - c))[
                None, :
            ]
            g = tl.exp2(tl.fma(dots, factor, -reference)) * both
        else:
            g = row_corrected[:, None] * tl.exp2(tl.fma(dots, factor, -r[:, None]))
            g += col_corrected_[None, :] * tl.exp2(tl.fma(dots, factor, -c[None, :]))
    elif ROWS:
        g = row_corrected[:, None] * tl.exp2(tl.fma(dots, factor, -r[:, None]))
    else:
        g = col_corrected_[None, :] * tl.exp2(tl.fma(dots, factor, -c[None, :]))
    if has_positive:
        target = hard_target * (row_weight[:, None] + col_weight_[None, :])
        g = tl.where(cols[None, :] == (rows + positive)[:, None], g - target, g)
    if SMOOTH:
        g -= (row_weight * row_constant)[:, None] + (col_weight_ * col_constant)[None, :]
    if KEYS:
        g = tl.where(left_out(rows, cols, n, m, row_keys, col_keys, positive), 0.0, g)
    if (first_row + HEIGHT > n) | (first_col + WIDTH > m):
        g = tl.where((rows < n)[:, None] & (cols < m)[None, :], g, 0.0)
    if STORE:
        at = panel + rows.to(tl.int64)[:, None] * stride_panel + cols[None, :]
        tl.store(at, g.to(panel.dtype.element_ty))
    return tl.sum(g * summable(dots, n), axis=1)
