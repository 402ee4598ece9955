"""The tiles of the Triton kernels: one table, by architecture and type.

The table is fixed, not tuned at run time, so that two machines of a kind, and two runs, add in the same order. A test
compiles every entry ahead of time. The choice is by reasoning, not yet by measurement: 128 x 128 tiles fit the shared
memory of every GPU (sm_86, sm_89 and sm_120 have 99 KB) and, with 8 warps, the registers of both passes. On Hopper 128
registers a thread let two programs share a multiprocessor, so that the exponentials of one overlap the matmul of the
other; a few registers spill, in the log-sum-exp kernel on sm_90 under Triton 3.9 on the common path (43 stores, 41
loads). float32 features are multiplied in IEEE precision, without tensor cores.
"""

from dataclasses import dataclass

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


WIDTH_STEP = 64
"""Features are padded to a multiple of this many numbers, which every `depth` divides."""
AMPERE = Tiles(128, 128, 32, warps=8, stages=3)
HOPPER = Tiles(128, 128, 64, warps=8, stages=3, registers=128)
BLACKWELL = Tiles(128, 128, 64, warps=8, stages=3)
FLOAT32 = Tiles(64, 64, 32, warps=4, stages=3)
INTERPRETER = Tiles(16, 32, 32, warps=1, stages=1)
"""Small, so that small shapes have many tiles."""


def tiles_for(capability: int, dtype: torch.dtype) -> Tiles:
    """The tiles for a compute capability (90 for 9.0) and the features' type."""
    if dtype == torch.float32:
        return FLOAT32
    return {9: HOPPER, 10: BLACKWELL}.get(capability // 10, AMPERE)
