"""The tiles of the Triton kernels, by architecture and type.

128 x 128 tiles fit the shared memory of every GPU (sm_86, sm_89 and sm_120 have 99 KB) and, with 8 warps, the registers
of both passes. On Hopper 128 registers a thread let two programs share a multiprocessor: the exponentials of one
overlap the matmul of the other. On an H100 wider tiles, which read less from the L2 cache, were no faster, and smaller
panels of score gradients were slower (docs/loss.md). float32 features are multiplied in IEEE precision, without tensor
cores.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TileShape:
    """The tiles of a panel, each a program of a kernel, and how it is compiled."""

    rows: int  # BM
    cols: int  # BN
    depth: int  # BK, the step along the feature width
    warps: int
    stages: int  # of the software pipeline
    registers: int | None = None  # most per thread; None for no limit
    panel_bytes: int = 512 << 20  # of score gradients; 16k x 16k in half precision keep the library's products large


# Features are padded to a multiple of this many numbers, which every `depth` divides.
WIDTH_STEP = 64
AMPERE = TileShape(128, 128, 32, warps=8, stages=3)
HOPPER = TileShape(128, 128, 64, warps=8, stages=3, registers=128)
BLACKWELL = TileShape(128, 128, 64, warps=8, stages=3)
FLOAT32 = TileShape(64, 64, 32, warps=4, stages=3)
# Small, so that small shapes have many tiles.
INTERPRETER = TileShape(16, 32, 32, warps=1, stages=1)

# First digits of the compute capability -> the tiles.
SHAPES = {8: AMPERE, 9: HOPPER, 10: BLACKWELL, 12: AMPERE}


def tiles_for(capability: int, dtype: torch.dtype) -> TileShape:
    """The tiles for a compute capability (90 for 9.0) and the features' type."""
    return FLOAT32 if dtype == torch.float32 else SHAPES.get(capability // 10, AMPERE)
