"""The pipeline of the warp-specialised kernels (Gluon): one warp loads tiles by TMA, others multiply and compute with them.

A program has one tile column and visits a strip of tile rows from top to bottom. Shared memory has a ring of STAGES stages with a step of
the rows' operand, and slots for the columns' operand, which is the same for the whole strip: the first RESIDENT steps of it are loaded
once and stay, the others come with every tile. A stage is used in turn by the loading warp, which waits until it is `free`, and by the
multiplying warps, which wait until it is `ready`. A barrier has a phase bit, which changes whenever it completes.

Hopper: two consumers of 4 warps multiply one half each of 256 rows into their registers. While one computes what follows, the other
multiplies. Blackwell: one more warp multiplies 128 rows into one of two accumulators in tensor memory; 4 warps compute with the other.

Letters as in tiles.py; BM the rows of a consumer's tile, HALVES the consumers.
"""

# mypy: disable-error-code="no-untyped-def"
# (the arguments of a kernel are Triton's pointers and numbers)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_commit, tcgen05_mma
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from clipscale.loss.triton.softmax import is_special

# Triton 3.9 has new names, and keeps the old ones as errors.
async_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
async_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)


@gluon.jit
def strip_of(n, strips, TALL: gl.constexpr):
    """This program's strip and tile column, and the strip's first tile row and the one after its last."""
    strip, tile_col = gl.program_id(0) % strips, gl.program_id(0) // strips
    high = gl.cdiv(n, TALL)
    return strip, tile_col, strip * high // strips, (strip + 1) * high // strips


@gluon.jit
def stages(
    u, v, STAGES: gl.constexpr, HALVES: gl.constexpr, RESIDENT: gl.constexpr, STREAMS: gl.constexpr,
):  # fmt: skip
    """Shared memory of the ring: the rows' tiles, the columns' tiles, and the barriers of the stages."""
    u_tiles = gl.allocate_shared_memory(u.dtype, [STAGES * HALVES] + u.block_type.shape, u.layout)
    v_slots: gl.constexpr = RESIDENT + (STAGES if STREAMS else 0)
    v_tiles = gl.allocate_shared_memory(v.dtype, [v_slots] + v.block_type.shape, v.layout)
    ready, free = barriers(STAGES, 1), barriers(STAGES, HALVES)
    return u_tiles, v_tiles, ready, free


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that complete after so many arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@gluon.jit
def is_skipped(
    tile_row, tile_col, n, m, positive, row_low, col_low, TALL: gl.constexpr, BN: gl.constexpr, SKIPS: gl.constexpr
):
    """Whether a tile is left to another kernel. All warps find the same."""
    skipped = tile_row < 0
    if SKIPS:
        skipped = is_special(tile_row, tile_col, n, m, positive, row_low, col_low, TALL, BN)
    return skipped


@gluon.jit
def load_tiles(
    u, v, u_tiles, v_tiles, ready, free, n, m, steps, positive, row_low, col_low, tile_col, start, stop,
    SKIPS: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr, RESIDENT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
):  # fmt: skip
    """The loading warp."""
    rows_bytes: gl.constexpr = HALVES * u.block_type.nbytes
    both_bytes: gl.constexpr = rows_bytes + v.block_type.nbytes
    step = 0
    for tile_row in range(start, stop):
        if not is_skipped(tile_row, tile_col, n, m, positive, row_low, col_low, HALVES * BM, BN, SKIPS):
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
                async_load(v, [tile_col * BN, k * BK], bar, v_tiles.index(v_slot(k, stage, RESIDENT)), pred=with_cols)
                step += 1


@gluon.jit
def v_slot(k, stage, RESIDENT: gl.constexpr):
    """Where step k of the columns' operand lies."""
    return gl.where(k < RESIDENT, k, RESIDENT + stage)


@gluon.jit
def hopper_dots(
    half: gl.constexpr, u_tiles, v_tiles, ready, free, steps, step, layout: gl.constexpr,
    STAGES: gl.constexpr, HALVES: gl.constexpr, RESIDENT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """<u_i, v_j> of a consumer's tile, (BM, BN) float32. `step` counts the program's steps so far."""
    dots = gl.zeros([BM, BN], gl.float32, layout)
    for k in range(0, steps):
        stage = (step + k) % STAGES
        mbarrier.wait(ready.index(stage), ((step + k) // STAGES) & 1)
        left, right = u_tiles.index(stage * HALVES + half), v_tiles.index(v_slot(k, stage, RESIDENT))
        dots = warpgroup_mma(left, right.permute((1, 0)), dots, is_async=True)
        dots = warpgroup_mma_wait(1, deps=(dots,))
        # All products but this one are done.
        mbarrier.arrive(free.index((step + k + STAGES - 1) % STAGES), pred=k > 0)
    dots = warpgroup_mma_wait(0, deps=(dots,))
    mbarrier.arrive(free.index((step + steps + STAGES - 1) % STAGES))
    return dots


@gluon.jit
def blackwell_products(
    u_tiles, v_tiles, ready, free, accumulators, full, empty, n, m, steps, positive, row_low, col_low, tile_col, start, stop,
    SKIPS: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """The multiplying warp. A tile's accumulator is `full` when its products are done, `empty` when it has been read."""
    step = 0
    tile = 0
    for tile_row in range(start, stop):
        if not is_skipped(tile_row, tile_col, n, m, positive, row_low, col_low, BM, BN, SKIPS):
            dots = accumulators.index(tile % 2)
            mbarrier.wait(empty.index(tile % 2), ((tile // 2) & 1) ^ 1)
            for k in range(0, steps):
                stage = step % STAGES
                mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                left, right = u_tiles.index(stage), v_tiles.index(v_slot(k, stage, RESIDENT))
                tcgen05_mma(left, right.permute((1, 0)), dots, use_acc=k > 0, mbarriers=[free.index(stage)])
                step += 1
            tcgen05_commit(full.index(tile % 2))
            tile += 1
