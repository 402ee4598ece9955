"""The tiles of the Triton kernels: one table of candidates, by architecture and type.

The first candidate is for small blocks, and wherever no trial is made (trial.py). It is by reasoning, not yet by
measurement: 128 x 128 tiles fit the shared memory of every GPU (sm_86, sm_89 and sm_120 have 99 KB) and, with 8 warps,
the registers of both passes. On Hopper 128 registers a thread let two programs share a multiprocessor, so that the
exponentials of one overlap the matmul of the other.

The others: tiles of 128 x 256 read three quarters as much from the L2 cache, which is what bounds the kernels by
calculation, with one program a multiprocessor; and panels that stay in the cache between the kernel and the library's
products. On Blackwell a wide tile takes 16 warps: with 8 the gradient kernel spills hundreds of registers. A test
compiles every shape ahead of time and knows what spills. float32 features are multiplied in IEEE precision, without
tensor cores.
"""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its panel."""

    rows: int  # BM
    cols: int  # BN
    depth: int  # BK, the step along the feature width
    warps: int
    stages: int  # of the software pipeline
    registers: int | None = None  # a thread may use; None: as many as there are
    panel_bytes: int = 512 << 20  # of score gradients; 16k x 16k in half precision keep the library's products large


WIDTH_STEP = 64
"""Features are padded to a multiple of this many numbers, which every `depth` divides."""
AMPERE = Tiles(128, 128, 32, warps=8, stages=3)
HOPPER = Tiles(128, 128, 64, warps=8, stages=3, registers=128)
BLACKWELL = Tiles(128, 128, 64, warps=8, stages=3)
FLOAT32 = Tiles(64, 64, 32, warps=4, stages=3)
INTERPRETER = Tiles(16, 32, 32, warps=1, stages=1)
"""Small, so that small shapes have many tiles."""


WIDE_AMPERE = replace(AMPERE, cols=256)
WIDE_HOPPER = Tiles(128, 256, 64, warps=8, stages=4)
WIDE_BLACKWELL = Tiles(128, 256, 64, warps=16, stages=3)
SHAPES = {
    8: (AMPERE, WIDE_AMPERE),
    9: (HOPPER, WIDE_HOPPER),
    10: (BLACKWELL, WIDE_BLACKWELL),
    12: (AMPERE, WIDE_AMPERE),
}
"""By the first digits of the compute capability."""
PANELS = 512 << 20, 64 << 20, 32 << 20
"""Bytes. The least ones stay in the L2 cache of an H100 (50 MB), or most of them do."""


def candidates_for(capability: int, dtype: torch.dtype) -> tuple[Tiles, ...]:
    """The tiles to choose from for a compute capability (90 for 9.0) and the features' type; without a trial the
    first."""
    if dtype == torch.float32:
        return (FLOAT32,)
    shapes = SHAPES.get(capability // 10, (AMPERE,))
    return tuple(replace(shape, panel_bytes=size) for shape in shapes for size in PANELS)
