"""The warp-specialised kernels for Hopper and Blackwell. Their formulas are those of softmax.py and sigmoid.py.

Letters as in gluon_pipeline.py; HALVES is 2 on Hopper and 1 on Blackwell.
"""

# mypy: disable-error-code="no-untyped-def"
# (the arguments of a kernel are Triton's pointers and numbers)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from clipscale.loss.triton.gluon_pipeline import async_store, is_skipped, layout_of, part_of, release, run, tile_dots
from clipscale.loss.triton.sigmoid import LOG2E, derivatives, signed_logits, softplus
from clipscale.loss.triton.softmax import column_terms, row_terms, score_gradient


@gluon.jit(do_not_specialize=["n", "m", "positive", "strips"])
def gluon_lse_kernel(
    u, v, factor, reference, row_reference, row_out, col_out, n, m, depth, positive, strips,
    ROWS: gl.constexpr, COLS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    HALVES: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr, STREAMS: gl.constexpr,
):  # fmt: skip
    """lse_kernel with FIND = SUMS, of whole tile columns and without keys. col_out has a line for each strip, on Hopper
    for each warp of its consumers."""
    run(
        _lse, (factor, reference, row_reference, row_out, col_out, ROWS, COLS),
        u, v, n, m, depth, positive, factor, factor, strips, False, BM, BN, BK, HALVES, STAGES, RESIDENT, STREAMS,
    )  # fmt: skip


@gluon.jit
def _lse(
    half: gl.constexpr, pipe, place, sizes, special, factor, reference, row_reference, row_out, col_out,
    ROWS: gl.constexpr, COLS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr,
):  # fmt: skip
    """Column sums are carried. On Hopper they are those of rows that lie in the same thread, of a whole tile; on Blackwell a thread has
    one row, and the tile is computed in eight parts."""
    PARTS: gl.constexpr = 1 if HALVES == 2 else 8
    WIDTH: gl.constexpr = BN // PARTS
    strip, tile_col, start, stop = place
    n, m, _ = sizes
    factor_, reference_ = gl.load(factor), gl.load(reference)
    sums = (_fold(gl.zeros([BM, WIDTH], gl.float32, layout_of(WIDTH, HALVES)), HALVES),) * PARTS
    for tile_row in range(start, stop):
        rows = (tile_row * HALVES + half) * BM + gl.arange(0, BM, gl.SliceLayout(1, layout_of(WIDTH, HALVES)))
        base = gl.load(row_reference + gl.minimum(rows, n - 1))
        row_sums = gl.zeros([BM], gl.float32, gl.SliceLayout(1, layout_of(WIDTH, HALVES)))
        dots = tile_dots(half, pipe, tile_row - start, sizes, BM, BN, HALVES, STAGES, RESIDENT)
        for part in gl.static_range(PARTS):
            terms = row_terms(part_of(dots, part, WIDTH, HALVES), factor_, base, rows, n)
            row_sums += gl.sum(terms, axis=1)
            if COLS:
                added = sums[part] + _fold(column_terms(terms, base, reference_), HALVES)
                sums = sums[:part] + (added,) + sums[part + 1 :]
        release(pipe, tile_row - start, HALVES)
        if ROWS:
            gl.store(row_out + tile_col.to(gl.int64) * n + rows, row_sums, mask=rows < n)
    if COLS:
        for part in gl.static_range(PARTS):
            if HALVES == 2:
                found = gl.sum(sums[part], axis=1)  # of each warp
                lines = strip * 8 + half * 4 + gl.arange(0, 4, gl.SliceLayout(1, found.type.layout))
                cols = tile_col * BN + gl.arange(0, BN, gl.SliceLayout(0, found.type.layout))
                gl.store(col_out + lines.to(gl.int64)[:, None] * m + cols[None, :], found)
            else:
                cols = tile_col * BN + part * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, layout_of(WIDTH, HALVES)))
                gl.store(col_out + strip.to(gl.int64) * m + cols, gl.sum(sums[part], axis=0))


@gluon.jit
def _fold(x, HALVES: gl.constexpr):
    """x (BM, BN); on Hopper fewer numbers whose columns have the same sums, (4, 8, BN): a thread has rows r, r + 8 of every 64."""
    if HALVES == 2:
        x = gl.sum(gl.sum(gl.reshape(x, [x.shape[0] // 64, 4, 2, 8, x.shape[1]]), axis=2), axis=0)
    return x


@gluon.jit(do_not_specialize=["n", "m", "positive", "strips"])
def gluon_softmax_gradient_kernel(
    u, v, panel, factor, row_lse, row_weight, row_link, col_factor, row_smoothing, col_smoothing, row_low, col_low, sums,
    n, m, depth, positive, strips,
    ROWS: gl.constexpr, COLS: gl.constexpr, SMOOTH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    HALVES: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr, STREAMS: gl.constexpr,
):  # fmt: skip
    """softmax_gradient_kernel with STORE, without keys, for the tiles of HALVES * BM x BN that are not special; sums has their lines."""
    buffers = gl.allocate_shared_memory(panel.dtype, [2 * HALVES] + panel.block_type.shape, panel.layout)
    run(
        _softmax_gradient,
        (factor, row_lse, row_weight, row_link, col_factor, row_smoothing, col_smoothing, panel, buffers, sums, ROWS, COLS, SMOOTH),
        u, v, n, m, depth, positive, row_low, col_low, strips, True, BM, BN, BK, HALVES, STAGES, RESIDENT, STREAMS,
    )  # fmt: skip


@gluon.jit
def _softmax_gradient(
    half: gl.constexpr, pipe, place, sizes, special, factor, row_lse, row_weight, row_link, col_factor, row_smoothing, col_smoothing,
    panel, buffers, sums, ROWS: gl.constexpr, COLS: gl.constexpr, SMOOTH: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = BN // 4
    _, tile_col, start, stop = place
    factor_ = gl.load(factor)
    tile = 0
    for tile_row in range(start, stop):
        first_row = (tile_row * HALVES + half) * BM
        inside = gl.arange(0, BM, gl.SliceLayout(1, layout_of(WIDTH, HALVES)))
        products = gl.zeros([BM], gl.float32, gl.SliceLayout(1, layout_of(WIDTH, HALVES)))
        if not is_skipped(tile_row, place, sizes, special, HALVES * BM, BN, True):
            lse = gl.load(row_lse + first_row + inside)
            dots = tile_dots(half, pipe, tile, sizes, BM, BN, HALVES, STAGES, RESIDENT)
            for part in gl.static_range(4):
                found = part_of(dots, part, WIDTH, HALVES)
                # Made here, the indices take no registers between the parts.
                rows = first_row + gl.arange(0, BM, gl.SliceLayout(1, layout_of(WIDTH, HALVES)))
                cols = tile_col * BN + part * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, layout_of(WIDTH, HALVES)))
                g = score_gradient(
                    found, factor_, lse, row_weight, row_link, col_factor, row_smoothing, col_smoothing, rows, cols, ROWS, COLS, SMOOTH
                )  # fmt: skip
                _store_part(g, tile_row, tile_col, part, half, panel, buffers, HALVES)
                products += gl.sum(g * found, axis=1)
            release(pipe, tile, HALVES)
            tile += 1
        gl.store(sums + _line(tile_row, tile_col, sizes, half, BM, BN, HALVES) + inside, products)
    tma.store_wait(0)


@gluon.jit
def _line(
    tile_row, tile_col, sizes, half: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, HALVES: gl.constexpr
):  # fmt: skip
    """Where the rows' sums of a consumer's tile begin."""
    return ((tile_row * gl.cdiv(sizes[1], BN) + tile_col) * HALVES + half) * BM


@gluon.jit
def _store_part(g, tile_row, tile_col, part: gl.constexpr, half: gl.constexpr, panel, buffers, HALVES: gl.constexpr):
    """Store a quarter of a tile of score gradients: by way of one of two buffers, when the store before last has read it."""
    buffer = buffers.index(2 * half + part % 2)
    tma.store_wait(1)
    buffer.store(g.to(panel.dtype))
    fence_async_shared()
    async_store(panel, [(tile_row * HALVES + half) * g.shape[0], (tile_col * 4 + part) * g.shape[1]], buffer)


@gluon.jit(do_not_specialize=["n", "m", "positive", "strips"])
def gluon_sigmoid_kernel(
    u, v, panel, scale, bias, gradient_scale, values, sums, products, n, m, depth, positive, strips,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    HALVES: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr, STREAMS: gl.constexpr,
):  # fmt: skip
    """sigmoid_kernel with VALUE, GRADIENT and STORE, without keys. Its sums have a line of HALVES * BM for each tile."""
    buffers = gl.allocate_shared_memory(panel.dtype, [2 * HALVES] + panel.block_type.shape, panel.layout)
    run(
        _sigmoid, (scale, bias, gradient_scale, panel, buffers, values, sums, products),
        u, v, n, m, depth, positive, scale, scale, strips, False, BM, BN, BK, HALVES, STAGES, RESIDENT, STREAMS,
    )  # fmt: skip


@gluon.jit
def _sigmoid(
    half: gl.constexpr, pipe, place, sizes, special, scale, bias, gradient_scale, panel, buffers, values, sums, products,
    BM: gl.constexpr, BN: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = BN // 4
    _, tile_col, start, stop = place
    n, m, _ = sizes
    positive = special[0]
    scale_, bias_, gradient_scale_ = gl.load(scale), gl.load(bias), gl.load(gradient_scale)
    for tile_row in range(start, stop):
        first_row = (tile_row * HALVES + half) * BM
        zeros = gl.zeros([BM], gl.float32, gl.SliceLayout(1, layout_of(WIDTH, HALVES)))
        value, sum_, product = zeros, zeros, zeros
        dots = tile_dots(half, pipe, tile_row - start, sizes, BM, BN, HALVES, STAGES, RESIDENT)
        for part in gl.static_range(4):
            found = part_of(dots, part, WIDTH, HALVES)
            first_col = tile_col * BN + part * WIDTH
            rows = first_row + gl.arange(0, BM, gl.SliceLayout(1, layout_of(WIDTH, HALVES)))
            cols = first_col + gl.arange(0, WIDTH, gl.SliceLayout(0, layout_of(WIDTH, HALVES)))
            logits = signed_logits(found, scale_, bias_, first_row, first_col, rows, cols, n, m, positive)
            small = gl.exp2(-gl.abs(logits) * LOG2E)
            value = value + gl.sum(softplus(logits, small), axis=1)
            g = derivatives(logits, small, first_row, first_col, rows, cols, positive)
            sum_ = sum_ + gl.sum(g, axis=1)
            product = product + gl.sum(g * found, axis=1)
            _store_part(g * gradient_scale_, tile_row, tile_col, part, half, panel, buffers, HALVES)
        release(pipe, tile_row - start, HALVES)
        inside = gl.arange(0, BM, gl.SliceLayout(1, layout_of(WIDTH, HALVES)))
        out = _line(tile_row, tile_col, sizes, half, BM, BN, HALVES) + inside
        gl.store(values + out, value)
        gl.store(sums + out, sum_)
        gl.store(products + out, product)
    tma.store_wait(0)
