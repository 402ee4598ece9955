"""The softmax's two kernels, warp-specialised for Hopper and Blackwell. Their formulas are those of softmax.py.

Letters as in gluon_pipeline.py; HALVES is 2 on Hopper and 1 on Blackwell.
"""

# mypy: disable-error-code="no-untyped-def"
# (the arguments of a kernel are Triton's pointers and numbers)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from clipscale.loss.triton.gluon_pipeline import (
    async_store,
    barriers,
    blackwell_products,
    hopper_dots,
    is_skipped,
    load_tiles,
    stages,
    strip_of,
)
from clipscale.loss.triton.softmax import column_terms, row_terms, score_gradient
from clipscale.loss.triton.tiles import quarters

# Registers a thread. Hopper: of the second consumer and of the loading warp; the first consumer gets what is left of 168 for each of 12
# warps, as many as the second. Blackwell: of a warp that loads or issues products.
CONSUMER, LOADER, SINGLE = gl.constexpr(224), gl.constexpr(56), gl.constexpr(96)


@gluon.jit(do_not_specialize=["n", "m", "strips"])
def lse_gluon_kernel(
    u, v, factor, reference, row_reference, row_out, col_out, n, m, depth, strips,
    ROWS: gl.constexpr, COLS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    HALVES: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr, STREAMS: gl.constexpr,
):  # fmt: skip
    """lse_kernel with FIND = SUMS, of whole tile columns and without keys. col_out has a line for each strip, on Hopper
    for each warp of its consumers."""
    strip, tile_col, start, stop = strip_of(n, strips, HALVES * BM)
    steps = depth // BK
    u_tiles, v_tiles, ready, free = stages(u, v, STAGES, HALVES, RESIDENT, STREAMS)
    row_out += tile_col.to(gl.int64) * n
    col_out += (strip * (8 if HALVES == 2 else 1)).to(gl.int64) * m + tile_col * BN
    if HALVES == 2:
        gl.warp_specialize(
            [
                (_hopper_lse, (
                    0, u_tiles, v_tiles, ready, free, factor, reference, row_reference, row_out, col_out, n, m, steps,
                    start, stop, ROWS, COLS, STAGES, RESIDENT, BM, BN,
                )),
                (_hopper_lse, (
                    1, u_tiles, v_tiles, ready, free, factor, reference, row_reference, row_out, col_out + 4 * m.to(gl.int64), n, m, steps,
                    start, stop, ROWS, COLS, STAGES, RESIDENT, BM, BN,
                )),
                (load_tiles, (
                    u, v, u_tiles, v_tiles, ready, free, n, m, steps, 0, factor, factor, tile_col, start, stop,
                    False, STAGES, HALVES, RESIDENT, BM, BN, BK,
                )),
            ],
            [4, 1],
            [CONSUMER, LOADER],
        )  # fmt: skip
    else:
        accumulators = allocate_tensor_memory(gl.float32, [2, BM, BN], TensorMemoryLayout((BM, BN), col_stride=1))
        full, empty = barriers(2, 1), barriers(2, 1)
        gl.warp_specialize(
            [
                (_blackwell_lse, (
                    accumulators, full, empty, factor, reference, row_reference, row_out, col_out, n, start, stop,
                    ROWS, COLS, BM, BN,
                )),
                (load_tiles, (
                    u, v, u_tiles, v_tiles, ready, free, n, m, steps, 0, factor, factor, tile_col, start, stop,
                    False, STAGES, HALVES, RESIDENT, BM, BN, BK,
                )),
                (blackwell_products, (
                    u_tiles, v_tiles, ready, free, accumulators, full, empty, n, m, steps, 0, factor, factor, tile_col, start, stop,
                    False, STAGES, RESIDENT, BM, BN,
                )),
            ],
            [1, 1],
            [SINGLE, SINGLE],
        )  # fmt: skip


@gluon.jit
def _hopper_lse(
    half: gl.constexpr, u_tiles, v_tiles, ready, free, factor, reference, row_reference, row_out, col_out, n, m, steps,
    start, stop, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """A consumer. It carries column sums of rows that lie in the same thread."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    factor_, reference_ = gl.load(factor), gl.load(reference)
    col_sums = _fold(gl.zeros([BM, BN], gl.float32, layout))
    step = 0
    for tile_row in range(start, stop):
        dots = hopper_dots(half, u_tiles, v_tiles, ready, free, steps, step, layout, STAGES, 2, RESIDENT, BM, BN)
        step += steps
        rows = (tile_row * 2 + half) * BM + gl.arange(0, BM, gl.SliceLayout(1, layout))
        base = gl.load(row_reference + gl.minimum(rows, n - 1))
        terms = row_terms(dots, factor_, base, rows, n)
        if ROWS:
            gl.store(row_out + rows, gl.sum(terms, axis=1), mask=rows < n)
        if COLS:
            col_sums += _fold(column_terms(terms, base, reference_))
    if COLS:
        sums = gl.sum(col_sums, axis=1)  # of each warp
        lines = gl.arange(0, 4, gl.SliceLayout(1, sums.type.layout)).to(gl.int64)
        cols = gl.arange(0, BN, gl.SliceLayout(0, sums.type.layout))
        gl.store(col_out + lines[:, None] * m + cols[None, :], sums)


@gluon.jit
def _fold(x):
    """x (BM, BN) with fewer numbers whose columns have the same sums: (4, 8, BN). A thread has rows r, r + 8 of every 64."""
    parts = gl.reshape(x, [x.shape[0] // 64, 4, 2, 8, x.shape[1]])
    return gl.sum(gl.sum(parts, axis=2), axis=0)


@gluon.jit
def _blackwell_lse(
    accumulators, full, empty, factor, reference, row_reference, row_out, col_out, n, start, stop,
    ROWS: gl.constexpr, COLS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """The warps that compute. A thread has a row, and carries its terms of the column sums."""
    WIDTH: gl.constexpr = BN // 8
    layout: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32, 1], [4, 1], [0, 1])
    factor_, reference_ = gl.load(factor), gl.load(reference)
    zeros = gl.zeros([BM, WIDTH], gl.float32, layout)
    sums0, sums1, sums2, sums3, sums4, sums5, sums6, sums7 = zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros
    tile = 0
    for tile_row in range(start, stop):
        rows = tile_row * BM + gl.arange(0, BM, gl.SliceLayout(1, layout))
        base = gl.load(row_reference + gl.minimum(rows, n - 1))
        dots = accumulators.index(tile % 2)
        mbarrier.wait(full.index(tile % 2), (tile // 2) & 1)
        row_sums = gl.zeros([BM], gl.float32, gl.SliceLayout(1, layout))
        row_sums, sums0 = _blackwell_part(dots, 0, row_sums, sums0, factor_, reference_, base, rows, n, layout, WIDTH)
        row_sums, sums1 = _blackwell_part(dots, 1, row_sums, sums1, factor_, reference_, base, rows, n, layout, WIDTH)
        row_sums, sums2 = _blackwell_part(dots, 2, row_sums, sums2, factor_, reference_, base, rows, n, layout, WIDTH)
        row_sums, sums3 = _blackwell_part(dots, 3, row_sums, sums3, factor_, reference_, base, rows, n, layout, WIDTH)
        row_sums, sums4 = _blackwell_part(dots, 4, row_sums, sums4, factor_, reference_, base, rows, n, layout, WIDTH)
        row_sums, sums5 = _blackwell_part(dots, 5, row_sums, sums5, factor_, reference_, base, rows, n, layout, WIDTH)
        row_sums, sums6 = _blackwell_part(dots, 6, row_sums, sums6, factor_, reference_, base, rows, n, layout, WIDTH)
        row_sums, sums7 = _blackwell_part(dots, 7, row_sums, sums7, factor_, reference_, base, rows, n, layout, WIDTH)
        mbarrier.arrive(empty.index(tile % 2))
        tile += 1  # noqa: SIM113 - Gluon has no enumerate
        if ROWS:
            gl.store(row_out + rows, row_sums, mask=rows < n)
    if COLS:
        cols = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
        gl.store(col_out + cols, gl.sum(sums0, axis=0))
        gl.store(col_out + WIDTH + cols, gl.sum(sums1, axis=0))
        gl.store(col_out + 2 * WIDTH + cols, gl.sum(sums2, axis=0))
        gl.store(col_out + 3 * WIDTH + cols, gl.sum(sums3, axis=0))
        gl.store(col_out + 4 * WIDTH + cols, gl.sum(sums4, axis=0))
        gl.store(col_out + 5 * WIDTH + cols, gl.sum(sums5, axis=0))
        gl.store(col_out + 6 * WIDTH + cols, gl.sum(sums6, axis=0))
        gl.store(col_out + 7 * WIDTH + cols, gl.sum(sums7, axis=0))


@gluon.jit
def _blackwell_part(
    accumulator, part: gl.constexpr, row_sums, col_sums, factor, reference, base, rows, n, layout: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """The sums of rows and columns with those of an eighth of a tile."""
    terms = row_terms(accumulator.slice(part * WIDTH, WIDTH).load(layout), factor, base, rows, n)
    return row_sums + gl.sum(terms, axis=1), col_sums + column_terms(terms, base, reference)


@gluon.jit(do_not_specialize=["n", "m", "positive", "strips"])
def softmax_gradient_gluon_kernel(
    u, v, factor, row_lse, row_weight, row_link, col_factor, row_smoothing, col_smoothing, row_low, col_low,
    panel, sums, n, m, depth, positive, strips,
    ROWS: gl.constexpr, COLS: gl.constexpr, SMOOTH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    HALVES: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr, STREAMS: gl.constexpr,
):  # fmt: skip
    """softmax_gradient_kernel with STORE, without keys, for the tiles of HALVES * BM x BN that are not special; sums has their lines."""
    _, tile_col, start, stop = strip_of(n, strips, HALVES * BM)
    steps = depth // BK
    u_tiles, v_tiles, ready, free = stages(u, v, STAGES, HALVES, RESIDENT, STREAMS)
    staging = gl.allocate_shared_memory(panel.dtype, [2 * HALVES] + panel.block_type.shape, panel.layout)
    if HALVES == 2:
        gl.warp_specialize(
            [
                (_hopper_gradient, (
                    0, u_tiles, v_tiles, ready, free, staging, factor, row_lse, row_weight, row_link, col_factor, row_smoothing,
                    col_smoothing, row_low, col_low, panel, sums, n, m, steps, positive, tile_col, start, stop,
                    ROWS, COLS, SMOOTH, STAGES, RESIDENT, BM, BN,
                )),
                (_hopper_gradient, (
                    1, u_tiles, v_tiles, ready, free, staging, factor, row_lse, row_weight, row_link, col_factor, row_smoothing,
                    col_smoothing, row_low, col_low, panel, sums, n, m, steps, positive, tile_col, start, stop,
                    ROWS, COLS, SMOOTH, STAGES, RESIDENT, BM, BN,
                )),
                (load_tiles, (
                    u, v, u_tiles, v_tiles, ready, free, n, m, steps, positive, row_low, col_low, tile_col, start, stop,
                    True, STAGES, HALVES, RESIDENT, BM, BN, BK,
                )),
            ],
            [4, 1],
            [CONSUMER, LOADER],
        )  # fmt: skip
    else:
        accumulators = allocate_tensor_memory(gl.float32, [2, BM, BN], TensorMemoryLayout((BM, BN), col_stride=1))
        full, empty = barriers(2, 1), barriers(2, 1)
        gl.warp_specialize(
            [
                (_blackwell_gradient, (
                    accumulators, full, empty, staging, factor, row_lse, row_weight, row_link, col_factor, row_smoothing,
                    col_smoothing, row_low, col_low, panel, sums, n, m, positive, tile_col, start, stop, ROWS, COLS, SMOOTH, BM, BN,
                )),
                (load_tiles, (
                    u, v, u_tiles, v_tiles, ready, free, n, m, steps, positive, row_low, col_low, tile_col, start, stop,
                    True, STAGES, HALVES, RESIDENT, BM, BN, BK,
                )),
                (blackwell_products, (
                    u_tiles, v_tiles, ready, free, accumulators, full, empty, n, m, steps, positive, row_low, col_low,
                    tile_col, start, stop, True, STAGES, RESIDENT, BM, BN,
                )),
            ],
            [1, 1],
            [SINGLE, SINGLE],
        )  # fmt: skip


@gluon.jit
def _hopper_gradient(
    half: gl.constexpr, u_tiles, v_tiles, ready, free, staging, factor, row_lse, row_weight, row_link, col_factor, row_smoothing,
    col_smoothing, row_low, col_low, panel, sums, n, m, steps, positive, tile_col, start, stop,
    ROWS: gl.constexpr, COLS: gl.constexpr, SMOOTH: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """A consumer."""
    WIDTH: gl.constexpr = BN // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    factor_ = gl.load(factor)
    step = 0
    for tile_row in range(start, stop):
        first_row = (tile_row * 2 + half) * BM
        inside = gl.arange(0, BM, gl.SliceLayout(1, layout))
        out = sums + (tile_row * gl.cdiv(m, BN) + tile_col) * (2 * BM) + half * BM + inside
        if is_skipped(tile_row, tile_col, n, m, positive, row_low, col_low, 2 * BM, BN, True):
            gl.store(out, gl.zeros([BM], gl.float32, gl.SliceLayout(1, layout)))
        else:
            dots = hopper_dots(half, u_tiles, v_tiles, ready, free, steps, step, layout, STAGES, 2, RESIDENT, BM, BN)
            step += steps
            parts = quarters(dots)
            products = gl.sum(gl.zeros_like(parts[0]), axis=1)
            lse = gl.load(row_lse + first_row + gl.arange(0, BM, gl.SliceLayout(1, parts[0].type.layout)))
            for part in gl.static_range(4):
                g = _gradient_part(
                    parts[part], part, half, staging, factor_, lse, row_weight, row_link, col_factor, row_smoothing,
                    col_smoothing, panel, first_row, tile_col * BN, ROWS, COLS, SMOOTH, WIDTH,
                )  # fmt: skip
                products += gl.sum(g * parts[part], axis=1)
            gl.store(out, gl.convert_layout(products, gl.SliceLayout(1, layout)))
    tma.store_wait(0)


@gluon.jit
def _blackwell_gradient(
    accumulators, full, empty, staging, factor, row_lse, row_weight, row_link, col_factor, row_smoothing,
    col_smoothing, row_low, col_low, panel, sums, n, m, positive, tile_col, start, stop,
    ROWS: gl.constexpr, COLS: gl.constexpr, SMOOTH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """The warps that compute."""
    WIDTH: gl.constexpr = BN // 4
    layout: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32, 1], [4, 1], [0, 1])
    factor_ = gl.load(factor)
    tile = 0
    for tile_row in range(start, stop):
        inside = gl.arange(0, BM, gl.SliceLayout(1, layout))
        products = gl.zeros([BM], gl.float32, gl.SliceLayout(1, layout))
        if not is_skipped(tile_row, tile_col, n, m, positive, row_low, col_low, BM, BN, True):
            dots = accumulators.index(tile % 2)
            lse = gl.load(row_lse + tile_row * BM + inside)
            mbarrier.wait(full.index(tile % 2), (tile // 2) & 1)
            for part in gl.static_range(4):
                found = dots.slice(part * WIDTH, WIDTH).load(layout)
                g = _gradient_part(
                    found, part, 0, staging, factor_, lse, row_weight, row_link, col_factor, row_smoothing,
                    col_smoothing, panel, tile_row * BM, tile_col * BN, ROWS, COLS, SMOOTH, WIDTH,
                )  # fmt: skip
                products += gl.sum(g * found, axis=1)
            mbarrier.arrive(empty.index(tile % 2))
            tile += 1
        gl.store(sums + (tile_row * gl.cdiv(m, BN) + tile_col) * BM + inside, products)
    tma.store_wait(0)


@gluon.jit
def _gradient_part(
    dots, part: gl.constexpr, half: gl.constexpr, staging, factor, lse, row_weight, row_link, col_factor, row_smoothing,
    col_smoothing, panel, first_row, first_col, ROWS: gl.constexpr, COLS: gl.constexpr, SMOOTH: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """The gradient in a quarter of a tile, which is stored: by way of one of two buffers, when the store before last has read it."""
    rows = first_row + gl.arange(0, dots.shape[0], gl.SliceLayout(1, dots.type.layout))
    cols = first_col + part * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, dots.type.layout))
    g = score_gradient(
        dots,
        factor,
        lse,
        row_weight,
        row_link,
        col_factor,
        row_smoothing,
        col_smoothing,
        rows,
        cols,
        ROWS,
        COLS,
        SMOOTH,
    )
    buffer = staging.index(2 * half + part % 2)
    tma.store_wait(1)
    buffer.store(g.to(panel.dtype))
    fence_async_shared()
    async_store(panel, [first_row, first_col + part * WIDTH], buffer)
    return g
