"""Triton kernels of the softmax objective: sums of exponentials of a panel, and a panel of the gradient.

Scores are in units of log 2: y_ij = factor <u_i, v_j> with factor = scale log2(e), rounded to float32 by the launcher, which corrects for
that rounding. The exponentials of row i are relative to a reference R_i that is known before: 2^(y_ij - R_i). Those of columns are the
same times 2^(R_i - t), with one t for all columns. Sums that may have lost terms are detected, and computed again with references of
their own.

Letters: N rows (images) and M columns (texts) of the panel, D feature width; BM x BN the tile, BK the step along D.
"""

# mypy: disable-error-code="no-untyped-def"
# (the arguments of a kernel are Triton's pointers and numbers)

import triton
import triton.language as tl

from clipscale.loss.triton.tiles import (
    crosses,
    fold,
    left_out,
    past_end,
    quarters,
    store_part,
    summable,
    tile_dots,
    tile_position,
)

NOTHING = tl.constexpr(float("-inf"))
SMALLEST = tl.constexpr(2.0**-126)
# What lse_kernel finds: sums relative to R_i and t; the largest scores; sums relative to references of rows and of columns.
SUMS, TOPS, OWN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def row_terms(dots, factor, reference, rows, n):
    """2^(y_ij - R_i), and 0 in rows past the end.

    The product is not rounded before the subtraction: at scale 100 that rounding alone would be 5e-6 of the exponential.
    """
    past = tl.where(rows < n, 0.0, NOTHING)
    return tl.exp2(tl.fma(dots, factor, (past - reference)[:, None]))


@triton.jit
def column_terms(terms, reference, t):
    """2^(y_ij - t) of the same."""
    return terms * tl.exp2(reference - t)[:, None]


@triton.jit(do_not_specialize=["n", "m", "positive", "strips", "kept_rows"])
def lse_kernel(
    u, v, factor, reference, row_reference, col_reference, enabled, row_keys, col_keys, row_out, col_out, kept,
    n, m, depth, stride_u, stride_v, positive, strips, kept_rows, stride_kept,
    FIND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, KEYS: tl.constexpr, EDGE: tl.constexpr, KEEP: tl.constexpr,
    TMA: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Out: row_out (ceil(M / BN), N), one line per tile column; col_out (strips, M), one line per strip of tile rows.

    A program has one tile column and one strip, whose tiles it visits from top to bottom. It carries the columns' sums element by
    element, so that sums across a program's threads are taken once at the end. One matmul and one exponential an element; with
    references of rows and columns two. Does nothing where `enabled` is 0. With KEEP the exponentials relative to R_i of the first
    `kept_rows` rows, whole tiles, are stored in `kept` too.
    """
    strip, tile_col = tl.program_id(0) % strips, tl.program_id(0) // strips
    high = tl.cdiv(n, BM)
    start, stop = strip * high // strips, (strip + 1) * high // strips
    if FIND != SUMS:
        stop = tl.where(tl.load(enabled) != 0, stop, start)
    factor_ = tl.load(factor)
    reference_ = tl.load(reference)
    cols = tile_col * BN + tl.arange(0, BN)
    col_reference_ = tl.zeros((BN,), dtype=tl.float32)
    if FIND == OWN and COLS:
        col_reference_ = tl.load(col_reference + tl.minimum(cols, m - 1))
    col_tops = tl.full((BN,), NOTHING, tl.float32)
    if PAIRS:
        col_sums = tl.zeros((BM // 16, 8, BN), dtype=tl.float32)
    else:
        col_sums = tl.zeros((BM, BN), dtype=tl.float32)
    for tile_row in range(start, stop):
        rows = tile_row * BM + tl.arange(0, BM)
        dots = tile_dots(u, v, tile_row, tile_col, n, m, depth, stride_u, stride_v, TMA, PRECISION, BM, BN, BK)
        if KEYS:
            dots = tl.where(left_out(rows, cols, n, m, row_keys, col_keys, positive), NOTHING, dots)
        if EDGE:
            dots = tl.where((cols < m)[None, :], dots, NOTHING)
        out = row_out + tile_col.to(tl.int64) * n + rows
        if FIND == TOPS:
            if ROWS:
                tl.store(out, tl.max(dots, axis=1) * factor_, mask=rows < n)
            if COLS:
                col_tops = tl.maximum(col_tops, tl.max(tl.where((rows < n)[:, None], dots, NOTHING), axis=0))
        else:
            base = tl.load(row_reference + tl.minimum(rows, n - 1))
            terms = row_terms(dots, factor_, base, rows, n)
            if ROWS:
                tl.store(out, tl.sum(terms, axis=1), mask=rows < n)
            if KEEP:  # noqa: SIM102 - a constant of the compiler, and a branch of the kernel
                if tile_row * BM < kept_rows:
                    parts = quarters(terms)
                    for part in tl.static_range(4):
                        store_part(kept, parts[part], tile_row * BM, tile_col * BN + part * (BN // 4), stride_kept, TMA)
            if FIND == OWN and COLS:
                past = tl.where(rows < n, 0.0, NOTHING)
                terms = tl.exp2(tl.fma(dots, factor_, past[:, None] - col_reference_[None, :]))
            elif COLS:
                terms = column_terms(terms, base, reference_)
            if COLS:
                col_sums += fold(terms, PAIRS)
    if COLS:
        out = col_out + strip.to(tl.int64) * m + cols
        if FIND == TOPS:
            tl.store(out, col_tops * factor_, mask=cols < m)
        else:
            sums = tl.sum(tl.sum(col_sums, axis=0), axis=0) if PAIRS else tl.sum(col_sums, axis=0)
            tl.store(out, sums, mask=cols < m)


@triton.jit
def is_special(tile_row, tile_col, n, m, positive, row_low, col_low, BM: tl.constexpr, BN: tl.constexpr):
    """Whether a tile of the gradient has a positive, an edge, or a row or column whose log-sum-exp is far from t."""
    low = (tl.load(row_low + tile_row) != 0) | (tl.load(col_low + tile_col) != 0)
    return low | past_end(tile_row, tile_col, n, m, BM, BN) | crosses(tile_row * BM, tile_col * BN, positive, BM, BN)


@triton.jit
def score_gradient(
    dots, factor, lse, row_weight, row_link, col_factor, row_smoothing, col_smoothing, rows, cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """gradient_scale G_ij of these rows and columns, as in softmax_gradient_kernel; lse is r of these rows."""
    g = tl.exp2(tl.fma(dots, factor, -lse[:, None]))
    if ROWS and COLS:
        link, weight = tl.load(row_link + rows)[:, None], tl.load(row_weight + rows)[:, None]
        g = g * tl.fma(link, tl.load(col_factor + cols)[None, :], weight)
    elif ROWS:
        g = g * tl.load(row_weight + rows)[:, None]
    else:
        g = g * (tl.load(row_link + rows)[:, None] * tl.load(col_factor + cols)[None, :])
    if SMOOTH:
        g -= tl.load(row_smoothing + rows)[:, None] + tl.load(col_smoothing + cols)[None, :]
    return g


@triton.jit(do_not_specialize=["n", "m", "positive"])
def softmax_gradient_kernel(
    u, v, factor, row_lse, row_weight, row_link, col_factor, row_smoothing, col_smoothing, row_low, col_low, row_keys, col_keys,
    panel, sums, n, m, depth, stride_u, stride_v, stride_panel, positive,
    ROWS: tl.constexpr, COLS: tl.constexpr, SMOOTH: tl.constexpr, STORE: tl.constexpr, KEYS: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """panel (N, M rounded up to whole tiles) = gradient_scale * G of one tile that is not special, from recomputed scores:

        gradient_scale G_ij = 2^(y_ij - r_i) (row_weight_i + row_link_i col_factor_j) - row_smoothing_i - col_smoothing_j

    with row_link_i = 2^(r_i - t) and col_factor_j = gradient_scale b_j 2^(t - c_j), one t for the block. sums (programs, BM) =
    the rows' sums of gradient_scale * G_ij <u_i, v_j>, before the panel's precision rounds it. With STORE false only the sums are
    written. Nothing overflows: y_ij <= min(r_i, c_j), and r_i and c_j are near t.
    """
    tile_row, tile_col = tile_position(n, m, BM, BN, GROUP)
    out = sums + tl.program_id(0) * BM + tl.arange(0, BM)
    if is_special(tile_row, tile_col, n, m, positive, row_low, col_low, BM, BN):
        tl.store(out, tl.zeros((BM,), dtype=tl.float32))
    else:
        dots = tile_dots(u, v, tile_row, tile_col, n, m, depth, stride_u, stride_v, TMA, PRECISION, BM, BN, BK)
        factor_ = tl.load(factor)
        rows = tile_row * BM + tl.arange(0, BM)
        lse = tl.load(row_lse + rows)
        WIDTH: tl.constexpr = BN // 4
        parts = quarters(dots)
        products = tl.zeros((BM,), dtype=tl.float32)
        later = tl.zeros((BM, WIDTH), dtype=tl.float32)
        for part in tl.static_range(4):
            cols = tile_col * BN + part * WIDTH + tl.arange(0, WIDTH)
            g = score_gradient(
                parts[part], factor_, lse, row_weight, row_link, col_factor, row_smoothing, col_smoothing, rows, cols,
                ROWS, COLS, SMOOTH,
            )  # fmt: skip
            if KEYS:
                g = tl.where(left_out(rows, cols, n, m, row_keys, col_keys, positive), 0.0, g)
            if STORE:
                store_part(panel, g, tile_row * BM, tile_col * BN + part * WIDTH, stride_panel, TMA)
            if part == 0:  # while all parts hold registers
                products = tl.sum(g * summable(parts[part], n), axis=1)
            else:
                later = tl.fma(g, summable(parts[part], n), later)
        tl.store(out, products + tl.sum(later, axis=1))


@triton.jit(do_not_specialize=["n", "m", "positive"])
def kept_gradient_kernel(
    u, v, factor, row_reference, row_weight, row_link, col_factor, row_low, col_low, kept, panel, sums,
    n, m, depth, stride_u, stride_v, stride_kept, stride_panel, positive,
    COLS: tl.constexpr, STORE: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The same from kept exponentials 2^(y_ij - R_i), without a matmul and without smoothing. row_weight and row_link have the factor
    2^(R_i - r_i); <u_i, v_j> is (R_i + log2 of the exponential) / factor.
    """
    tile_row, tile_col = tile_position(n, m, BM, BN, GROUP)
    products = tl.zeros((BM,), dtype=tl.float32)
    if not is_special(tile_row, tile_col, n, m, positive, row_low, col_low, BM, BN):
        rows = tile_row * BM + tl.arange(0, BM)
        base = tl.load(row_reference + rows)[:, None]
        WIDTH: tl.constexpr = BN // 4
        for part in tl.static_range(4):
            first = tile_col * BN + part * WIDTH
            cols = first + tl.arange(0, WIDTH)
            if TMA:
                e = kept.load([tile_row * BM, first]).to(tl.float32)
            else:
                e = tl.load(kept + rows.to(tl.int64)[:, None] * stride_kept + cols[None, :]).to(tl.float32)
            weight = tl.load(row_weight + rows)[:, None]
            if COLS:
                weight = tl.fma(tl.load(row_link + rows)[:, None], tl.load(col_factor + cols)[None, :], weight)
            g = e * weight
            if STORE:
                store_part(panel, g, tile_row * BM, first, stride_panel, TMA)
            scores = base + tl.log2(tl.maximum(e, SMALLEST))  # of what has underflowed g is nothing
            products += tl.sum(g * scores, axis=1)
        products = products / tl.load(factor)
    tl.store(sums + tl.program_id(0) * BM + tl.arange(0, BM), products)


@triton.jit(do_not_specialize=["n", "m", "positive"])
def special_gradient_kernel(
    u, v, factor, row_lse, col_lse, row_weight, col_weight, row_target, col_target, row_smoothing, col_smoothing,
    row_low, col_low, row_keys, col_keys, panel, sums, n, m, depth, stride_u, stride_v, stride_panel, positive,
    ROWS: tl.constexpr, COLS: tl.constexpr, SMOOTH: tl.constexpr, STORE: tl.constexpr, KEYS: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """The same for BM rows (program) of the special tiles, which have HEIGHT: zero past the end, with two exponentials an element.

        gradient_scale G_ij = row_weight_i 2^(y_ij - r_i) + col_weight_j 2^(y_ij - c_j) - row_smoothing_i - col_smoothing_j
                              - (row_target_i + col_target_j) [j = positive + i]

    Late in training a positive's probabilities are near 1 and cancel against the weights. A common exponential, with an exponent t - r_i
    far from 0, would round away what is left. The weights are corrected for the rounding of r and c to float32.
    """
    tile_row = tl.program_id(0)
    rows = tile_row * BM + tl.arange(0, BM)
    row_at = tl.minimum(rows, n - 1)
    factor_ = tl.load(factor)
    WIDTH: tl.constexpr = BN // 4
    products = tl.zeros((BM,), dtype=tl.float32)
    for tile_col in range(0, tl.cdiv(m, BN)):
        if is_special(tile_row * BM // HEIGHT, tile_col, n, m, positive, row_low, col_low, HEIGHT, BN):
            dots = tile_dots(u, v, tile_row, tile_col, n, m, depth, stride_u, stride_v, TMA, PRECISION, BM, BN, BK)
            parts = quarters(dots)
            for part in tl.static_range(4):
                cols = tile_col * BN + part * WIDTH + tl.arange(0, WIDTH)
                col_at = tl.minimum(cols, m - 1)
                g = tl.zeros((BM, WIDTH), dtype=tl.float32)
                target = g
                if ROWS:
                    r = tl.load(row_lse + row_at)[:, None]
                    g += tl.load(row_weight + row_at)[:, None] * tl.exp2(tl.fma(parts[part], factor_, -r))
                    target += tl.load(row_target + row_at)[:, None]
                if COLS:
                    c = tl.load(col_lse + col_at)[None, :]
                    g += tl.load(col_weight + col_at)[None, :] * tl.exp2(tl.fma(parts[part], factor_, -c))
                    target += tl.load(col_target + col_at)[None, :]
                g = tl.where(cols[None, :] == (rows + positive)[:, None], g - target, g)
                if SMOOTH:
                    g -= tl.load(row_smoothing + row_at)[:, None] + tl.load(col_smoothing + col_at)[None, :]
                if KEYS:
                    g = tl.where(left_out(rows, cols, n, m, row_keys, col_keys, positive), 0.0, g)
                g = tl.where((rows < n)[:, None] & (cols < m)[None, :], g, 0.0)
                if STORE:
                    store_part(panel, g, tile_row * BM, tile_col * BN + part * WIDTH, stride_panel, TMA)
                products += tl.sum(g * summable(parts[part], n), axis=1)
    tl.store(sums + tile_row, tl.sum(products, axis=0))
