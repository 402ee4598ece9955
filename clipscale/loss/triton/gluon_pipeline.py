"""The pipeline of the warp-specialised kernels (Gluon): one warp loads tiles by TMA, others multiply and compute with them.

A program has one tile column and visits a strip of tile rows from top to bottom. Shared memory has a ring of STAGES stages with a step of
the rows' operand, and slots for the columns' operand, which is the same for the whole strip: the first RESIDENT steps of it are loaded
once and stay, the others come with every tile. A stage is used in turn by the loading warp, which waits until it is `free`, and by the
multiplying warps, which wait until it is `ready`. A barrier has a phase bit, which changes whenever it completes.

Hopper: two consumers of 4 warps multiply one half each of 256 rows into their registers. While one computes what follows, the other
multiplies. Blackwell: one more warp multiplies 128 rows into one of two accumulators in tensor memory; 4 warps compute with the other.

A kernel is a function `compute` that the consumers call: it visits the tiles, takes each tile's dot products from `tile_dots`, a part at a
time from `part_of`, and gives them back by `release`.

Letters as in tiles.py; BM the rows of a consumer's tile, HALVES the consumers. `pipe` holds memory and barriers, `place` the program's
strip, tile column, first tile row and the one after its last, `sizes` n, m and the steps along D, `special` what is_special takes.
"""

# mypy: disable-error-code="no-untyped-def"
# (the arguments of a kernel are Triton's pointers and numbers)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from clipscale.loss.triton.softmax import is_special
from clipscale.loss.triton.tiles import quarters

# Triton 3.9 has new names, and keeps the old ones as errors.
async_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
async_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)
# Registers a thread. Hopper: of the second consumer and of the loading warp; the first consumer gets what is left of 168 for each of 12
# warps, as many as the second. Blackwell: of a warp that loads or issues products.
CONSUMER, LOADER, SINGLE = gl.constexpr(232), gl.constexpr(40), gl.constexpr(96)


@gluon.jit
def run(
    compute: gl.constexpr, terms, u, v, n, m, depth, positive, row_low, col_low, strips, SKIPS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    HALVES: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr, STREAMS: gl.constexpr,
):  # fmt: skip
    """A program of a kernel. The tiles that are special are left out where it SKIPS them."""
    strip, high = gl.program_id(0) % strips, gl.cdiv(n, HALVES * BM)
    place = (strip, gl.program_id(0) // strips, strip * high // strips, (strip + 1) * high // strips)
    sizes, special = (n, m, depth // BK), (positive, row_low, col_low)
    u_tiles = gl.allocate_shared_memory(u.dtype, [STAGES * HALVES] + u.block_type.shape, u.layout)
    v_slots: gl.constexpr = RESIDENT + (STAGES if STREAMS else 0)
    v_tiles = gl.allocate_shared_memory(v.dtype, [v_slots] + v.block_type.shape, v.layout)
    pipe = (u_tiles, v_tiles, _barriers(STAGES, 1), _barriers(STAGES, HALVES))  # ready, free
    if HALVES == 2:
        gl.warp_specialize(
            [
                (_consume, (compute, 0, pipe, place, sizes, special, terms, BM, BN, HALVES, STAGES, RESIDENT)),
                (_consume, (compute, 1, pipe, place, sizes, special, terms, BM, BN, HALVES, STAGES, RESIDENT)),
                (_load_tiles, (u, v, pipe, place, sizes, special, SKIPS, BM, BN, BK, HALVES, STAGES, RESIDENT)),
            ],
            [4, 1],
            [CONSUMER, LOADER],
        )
    else:
        accumulators = allocate_tensor_memory(gl.float32, [2, BM, BN], TensorMemoryLayout((BM, BN), col_stride=1))
        products = (accumulators, _barriers(2, 1), _barriers(2, 1))  # full, empty
        gl.warp_specialize(
            [
                (_consume, (compute, 0, products, place, sizes, special, terms, BM, BN, HALVES, STAGES, RESIDENT)),
                (_load_tiles, (u, v, pipe, place, sizes, special, SKIPS, BM, BN, BK, HALVES, STAGES, RESIDENT)),
                (_multiply, (pipe, products, place, sizes, special, SKIPS, BM, BN, STAGES, RESIDENT)),
            ],
            [1, 1],
            [SINGLE, SINGLE],
        )


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that complete after so many arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@gluon.jit
def _consume(
    compute: gl.constexpr, half: gl.constexpr, pipe, place, sizes, special, terms,
    BM: gl.constexpr, BN: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr,
):  # fmt: skip
    compute(half, pipe, place, sizes, special, *terms, BM, BN, HALVES, STAGES, RESIDENT)


@gluon.jit
def is_skipped(tile_row, place, sizes, special, TALL: gl.constexpr, BN: gl.constexpr, SKIPS: gl.constexpr):
    """Whether a tile is left to another kernel. All warps find the same."""
    skipped = tile_row < 0
    if SKIPS:
        skipped = is_special(tile_row, place[1], sizes[0], sizes[1], special[0], special[1], special[2], TALL, BN)
    return skipped


@gluon.jit
def _load_tiles(
    u, v, pipe, place, sizes, special, SKIPS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    HALVES: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr,
):  # fmt: skip
    """The loading warp."""
    u_tiles, v_tiles, ready, free = pipe
    _, tile_col, start, stop = place
    steps = sizes[2]
    rows_bytes: gl.constexpr = HALVES * u.block_type.nbytes
    both_bytes: gl.constexpr = rows_bytes + v.block_type.nbytes
    step = 0
    for tile_row in range(start, stop):
        if not is_skipped(tile_row, place, sizes, special, HALVES * BM, BN, SKIPS):
            for k in range(0, steps):
                stage = step % STAGES
                bar = ready.index(stage)
                with_cols = (step < steps) | (k >= RESIDENT)
                mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, rows_bytes, pred=not with_cols)
                mbarrier.expect(bar, both_bytes, pred=with_cols)
                for half in gl.static_range(HALVES):
                    first = (tile_row * HALVES + half) * BM
                    async_load(u, [first, k * BK], bar, u_tiles.index(stage * HALVES + half))
                async_load(v, [tile_col * BN, k * BK], bar, v_tiles.index(_v_slot(k, stage, RESIDENT)), pred=with_cols)
                step += 1


@gluon.jit
def _v_slot(k, stage, RESIDENT: gl.constexpr):
    """Where step k of the columns' operand lies."""
    return gl.where(k < RESIDENT, k, RESIDENT + stage)


@gluon.jit
def _multiply(
    pipe, products, place, sizes, special,
    SKIPS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr,
):  # fmt: skip
    """Blackwell's multiplying warp. An accumulator is `full` when a tile's products are done, `empty` when it has been read."""
    u_tiles, v_tiles, ready, free = pipe
    accumulators, full, empty = products
    step = 0
    tile = 0
    for tile_row in range(place[2], place[3]):
        if not is_skipped(tile_row, place, sizes, special, BM, BN, SKIPS):
            dots = accumulators.index(tile % 2)
            mbarrier.wait(empty.index(tile % 2), ((tile // 2) & 1) ^ 1)
            for k in range(0, sizes[2]):
                stage = step % STAGES
                mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                left, right = u_tiles.index(stage), v_tiles.index(_v_slot(k, stage, RESIDENT))
                tcgen05_mma(left, right.permute((1, 0)), dots, use_acc=k > 0, mbarriers=[free.index(stage)])
                step += 1
            tcgen05_commit(full.index(tile % 2))
            tile += 1


@gluon.constexpr_function
def layout_of(WIDTH, HALVES):
    """Of WIDTH columns of a tile's dot products in registers. On Blackwell a thread has a row."""
    if HALVES == 2:
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    return gl.BlockedLayout([1, WIDTH], [32, 1], [4, 1], [0, 1])


@gluon.jit
def tile_dots(
    half: gl.constexpr, pipe, tile, sizes,
    BM: gl.constexpr, BN: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr,
):  # fmt: skip
    """<u_i, v_j> of a consumer's tile, (BM, BN) float32; `tile` counts the program's tiles so far. On Blackwell in tensor memory."""
    if HALVES == 2:
        u_tiles, v_tiles, ready, free = pipe
        steps = sizes[2]
        step = tile * steps
        dots = gl.zeros([BM, BN], gl.float32, layout_of(BN, HALVES))
        for k in range(0, steps):
            stage = (step + k) % STAGES
            mbarrier.wait(ready.index(stage), ((step + k) // STAGES) & 1)
            left, right = u_tiles.index(stage * HALVES + half), v_tiles.index(_v_slot(k, stage, RESIDENT))
            dots = warpgroup_mma(left, right.permute((1, 0)), dots, is_async=True)
            dots = warpgroup_mma_wait(1, deps=(dots,))
            # All products but this one are done.
            mbarrier.arrive(free.index((step + k + STAGES - 1) % STAGES), pred=k > 0)
        dots = warpgroup_mma_wait(0, deps=(dots,))
        mbarrier.arrive(free.index((step + steps + STAGES - 1) % STAGES))
    else:
        accumulators, full, _ = pipe
        mbarrier.wait(full.index(tile % 2), (tile // 2) & 1)
        dots = accumulators.index(tile % 2)
    return dots


@gluon.jit
def part_of(dots, part: gl.constexpr, WIDTH: gl.constexpr, HALVES: gl.constexpr):
    """WIDTH columns of a tile's dot products, in registers: on Hopper all of them or a quarter."""
    if HALVES == 1:
        found = dots.slice(part * WIDTH, WIDTH).load(layout_of(WIDTH, HALVES))
    elif dots.shape[1] == WIDTH:
        found = dots
    else:
        found = gl.convert_layout(quarters(dots)[part], layout_of(WIDTH, HALVES), assert_trivial=True)
    return found


@gluon.jit
def release(pipe, tile, HALVES: gl.constexpr):
    """The tile's dot products have been read."""
    if HALVES == 1:
        mbarrier.arrive(pipe[2].index(tile % 2))
