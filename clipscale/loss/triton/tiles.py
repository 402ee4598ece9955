"""What the Triton kernels share: a program's tile, its dot products, and its four quarters.

Letters: N rows (images) and M columns (texts) of the panel a launch covers, D feature width; BM x BN the tile, BK the step along D.
Exponentials are taken in base 2, the one instruction the hardware has for them.
"""

# mypy: disable-error-code="no-untyped-def"
# (the arguments of a kernel are Triton's pointers and numbers)

import triton
import triton.language as tl

# Triton before 3.9 cannot compile, for sm_100, a sum over columns of dot products as they come from tensor memory.
HIDES_DOTS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9))


@triton.jit
def tile_position(n, m, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """This program's tile row and tile column. GROUP tile rows are visited together, so that their operands stay in the L2 cache."""
    program = tl.program_id(0)
    high, wide = tl.cdiv(n, BM), tl.cdiv(m, BN)
    first = program // (GROUP * wide) * GROUP
    height = tl.minimum(high - first, GROUP)
    rest = program % (GROUP * wide)
    return first + rest % height, rest // height


@triton.jit
def tile_dots(
    u, v, tile_row, tile_col, n, m, depth, stride_u, stride_v,
    TMA: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """<u_i, v_j> of the tile, (BM, BN) float32. Rows and columns past the end are something; depth is a multiple of BK.

    With TMA u and v are tensor descriptors with blocks of (BM, BK) and (BN, BK), else pointers.
    """
    dots = tl.zeros((BM, BN), dtype=tl.float32)
    if TMA:
        for k in range(0, depth, BK):
            left, right = u.load([tile_row * BM, k]), v.load([tile_col * BN, k])
            dots = tl.dot(left, right.T, dots, input_precision=PRECISION)
    else:
        rows = tl.minimum(tile_row * BM + tl.arange(0, BM), n - 1).to(tl.int64)
        cols = tl.minimum(tile_col * BN + tl.arange(0, BN), m - 1).to(tl.int64)
        inner = tl.arange(0, BK)
        u_at = u + rows[:, None] * stride_u + inner[None, :]
        v_at = v + cols[None, :] * stride_v + inner[:, None]
        for _ in range(0, depth, BK):
            dots = tl.dot(tl.load(u_at), tl.load(v_at), dots, input_precision=PRECISION)
            u_at += BK
            v_at += BK
    return dots


@triton.jit
def store_part(panel, g, first_row, first_col, stride_panel, TMA: tl.constexpr):
    """Store a quarter of a tile of score gradients. With TMA `panel` is a tensor descriptor with such blocks, else a pointer."""
    if TMA:
        panel.store([first_row, first_col], g.to(panel.dtype))
    else:
        rows = first_row + tl.arange(0, g.shape[0])
        cols = first_col + tl.arange(0, g.shape[1])
        tl.store(panel + rows.to(tl.int64)[:, None] * stride_panel + cols[None, :], g.to(panel.dtype.element_ty))


@triton.jit
def left_out(rows, cols, n, m, row_keys, col_keys, positive):
    """(BM, BN) true where a pair's keys agree and it is not the positive, which is column positive + i for row i."""
    row_key = tl.load(row_keys + tl.minimum(rows, n - 1))
    col_key = tl.load(col_keys + tl.minimum(cols, m - 1))
    return (row_key[:, None] == col_key[None, :]) & (cols[None, :] != (rows + positive)[:, None])


@triton.jit
def crosses(first_row, first_col, positive, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Whether this HEIGHT x WIDTH part contains a positive (column positive + i for row i). Most parts do not."""
    start = first_row + positive
    return (start < first_col + WIDTH) & (start + HEIGHT > first_col)


@triton.jit
def past_end(tile_row, tile_col, n, m, BM: tl.constexpr, BN: tl.constexpr):
    """Whether a part of the tile lies past the end of the panel."""
    return (tile_row * BM + BM > n) | (tile_col * BN + BN > m)


@triton.jit
def fold(x, PAIRS: tl.constexpr):
    """x (BM, BN) with fewer numbers whose columns have the same sums. With PAIRS rows r and r + 8 of 16 are added: (BM / 16, 8, BN).

    That is a thread's own addition in the layout of Ampere's and Hopper's dot products.
    """
    folded = x
    if PAIRS:
        folded = tl.sum(tl.reshape(x, (x.shape[0] // 16, 2, 8, x.shape[1])), axis=1)
    return folded


@triton.jit
def quarters(x):
    """The four column quarters of x (BM, BN), left to right.

    The code after this is emitted for one quarter at a time. Its intermediates then leave the accumulators their registers: with the
    whole tile at once the gradient kernels spill. In the layouts that tl.dot returns the split moves no data.
    """
    left, right = _halves(x)
    first, second = _halves(left)
    third, fourth = _halves(right)
    return first, second, third, fourth


@triton.jit
def _halves(x):
    HEIGHT: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, (HEIGHT, 2, HALF)), (0, 2, 1)))


@triton.jit
def summable(dots, n):
    """The dot products, for use in a sum. Where Triton needs it, they come out of a branch that is never taken (n < 0)."""
    if HIDES_DOTS:  # noqa: SIM102 - a constant of the compiler, and a branch of the kernel
        if n < 0:
            dots = -dots
    return dots
