"""Device functions that the Triton kernels share: a program's tile, its dot products, and its parts.

Letters: N rows (images) and M columns (texts) of the panel a launch covers, D feature width; BM x BN the tile, BK the
step along D.
"""

# mypy: disable-error-code="no-untyped-def"
# (the arguments of a kernel are Triton's pointers and numbers)

import triton
import triton.language as tl

GROUP = tl.constexpr(8)  # tile rows that are visited together, so that their operands stay in the L2 cache
LOG2E = tl.constexpr(1.4426950408889634)
NEG_INF = tl.constexpr(float("-inf"))
# Score gradients are stored times this, so that float16, which has few exponents, keeps a probability of 1/N. They are
# at most 1.
GRAD_SCALE = tl.constexpr(2.0**13)
# Triton before 3.9 cannot compile, for sm_100, a sum over columns of dot products as they come from tensor memory.
HIDES_DOTS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9))


@triton.jit
def tile_position(n, m, BM: tl.constexpr, BN: tl.constexpr):
    """This program's tile row and tile column."""
    program = tl.program_id(0)
    high = tl.cdiv(n, BM)
    wide = tl.cdiv(m, BN)
    first = program // (GROUP * wide) * GROUP
    height = tl.minimum(high - first, GROUP)
    rest = program % (GROUP * wide)
    return first + rest % height, rest // height


@triton.jit
def tile_dots(
    u, v, tile_row, tile_col, n, m, depth, stride_u, stride_v,
    TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """<u_i, v_j> of the tile, (BM, BN) float32. Past the end they are any finite numbers; depth is a multiple of BK.

    With TMA u and v are tensor descriptors with blocks of (BM, BK) and (BN, BK), else pointers.
    """
    dots = tl.zeros((BM, BN), dtype=tl.float32)
    if TMA:
        for k in range(0, depth, BK):
            left = u.load([tile_row * BM, k])
            right = v.load([tile_col * BN, k])
            dots = tl.dot(left, right.T, dots, input_precision="ieee")
    else:
        rows = tl.minimum(tile_row * BM + tl.arange(0, BM), n - 1).to(tl.int64)
        cols = tl.minimum(tile_col * BN + tl.arange(0, BN), m - 1).to(tl.int64)
        inner = tl.arange(0, BK)
        u_at = u + rows[:, None] * stride_u + inner[None, :]
        v_at = v + cols[None, :] * stride_v + inner[:, None]
        for _ in range(0, depth, BK):
            dots = tl.dot(tl.load(u_at), tl.load(v_at), dots, input_precision="ieee")
            u_at += BK
            v_at += BK
    return dots


@triton.jit
def where_inside(x, other, rows, cols, n, m):
    """x (BM, BN), and `other` past the end."""
    if (tl.max(rows, axis=0) >= n) | (tl.max(cols, axis=0) >= m):
        x = tl.where((rows < n)[:, None] & (cols < m)[None, :], x, other)
    return x


@triton.jit
def quarters(x):
    """The four column quarters of x (BM, BN), left to right.

    The code after this is emitted for one quarter at a time. Its intermediates then leave the accumulators their
    registers: with the whole tile at once the gradient kernels spill. In the layouts that tl.dot returns the split
    moves no data.
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
def dots_for_sum(dots, n):
    """The dot products, usable in a sum: where HIDES_DOTS, a branch that is never taken hides where they come from."""
    if HIDES_DOTS:  # noqa: SIM102 - a constant of the compiler, and a branch of the kernel
        if n < 0:
            dots = -dots
    return dots


@triton.jit
def has_positives(first_row, first_col, positive_offset, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Whether this part of the scores may contain a positive. Most do not."""
    start = first_row + positive_offset
    return (start < first_col + WIDTH) & (start + HEIGHT > first_col)


@triton.jit
def is_positive(rows, cols, positive_offset):
    """Whether row and column belong together, (BM, BN)."""
    return cols[None, :] == (rows + positive_offset)[:, None]


@triton.jit
def store_quarter(panel, x, first_row, first_col, stride_panel, TMA: tl.constexpr):
    """Store a quarter of a tile; the panel has whole tiles. With TMA `panel` is a tensor descriptor, else a pointer."""
    if TMA:
        panel.store([first_row, first_col], x.to(panel.dtype))
    else:
        rows = (first_row + tl.arange(0, x.shape[0])).to(tl.int64)
        cols = first_col + tl.arange(0, x.shape[1])
        tl.store(panel + rows[:, None] * stride_panel + cols[None, :], x.to(panel.dtype.element_ty))
