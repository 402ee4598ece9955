"""Tile shapes of the Triton kernels: one table, by architecture, pass and arithmetic.

Registers, shared memory and tensor-core instructions of every entry are checked by an ahead-of-time compile in the tests. The choice
between entries that pass that check is by reasoning, not yet by measurement: `python -m clipscale.loss.triton.tune` measures.

    sm_90: 128 x 128 with 8 warps held to 128 registers a thread, so that two programs share a multiprocessor and one's exponentials
    overlap the other's matmul.
    sm_80 and the default: 4 warps with up to 255 registers, for the same two programs. Shared memory stays under the 99 KB of sm_86,
    sm_89 and sm_120.
    sm_100: the accumulators lie in tensor memory with a row to a thread, so that column sums cross all lanes; the forward kernels
    need more registers than two programs leave.
    IEEE float32 has no tensor cores: 64 x 64.
"""

import os
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its panel."""

    rows: int  # BM
    cols: int  # BN
    depth: int  # BK, the step along the feature width; the operands are padded to a multiple of it
    warps: int
    stages: int  # of the software pipeline
    registers: int | None = None  # a thread may use; None: as many as there are
    group: int = 8  # tile rows swept together


IEEE = Tiles(64, 64, 32, warps=4, stages=3)
# (pass, arithmetic) -> tiles. With keys, a pass has masks that take registers.
AMPERE = {
    ("forward", "half"): Tiles(128, 128, 32, warps=4, stages=4),
    ("forward with keys", "half"): Tiles(128, 64, 32, warps=4, stages=4),
    ("backward", "half"): Tiles(128, 128, 32, warps=4, stages=4),
    ("backward with keys", "half"): Tiles(128, 128, 32, warps=4, stages=4),
    ("forward", "tf32"): Tiles(128, 128, 32, warps=8, stages=3),
    ("forward with keys", "tf32"): Tiles(128, 128, 32, warps=8, stages=3),
    ("backward", "tf32"): Tiles(128, 128, 32, warps=8, stages=3),
    ("backward with keys", "tf32"): Tiles(128, 128, 32, warps=8, stages=3),
}
HOPPER = {
    ("forward", "half"): Tiles(128, 128, 64, warps=8, stages=3, registers=128),
    ("forward with keys", "half"): Tiles(128, 64, 64, warps=8, stages=3),
    ("backward", "half"): Tiles(128, 128, 64, warps=8, stages=3, registers=128),
    ("backward with keys", "half"): Tiles(128, 128, 64, warps=8, stages=3),
    ("forward", "tf32"): Tiles(128, 128, 32, warps=8, stages=3, registers=128),
    ("forward with keys", "tf32"): Tiles(128, 64, 32, warps=8, stages=3),
    ("backward", "tf32"): Tiles(128, 128, 32, warps=8, stages=3),
    ("backward with keys", "tf32"): Tiles(128, 128, 32, warps=8, stages=3),
}
BLACKWELL = HOPPER | {
    ("forward", "half"): Tiles(128, 128, 64, warps=8, stages=3),
    ("forward", "tf32"): Tiles(128, 128, 32, warps=8, stages=3),
}
TABLE = {80: AMPERE, 90: HOPPER, 100: BLACKWELL, 103: BLACKWELL}
INTERPRETER = Tiles(16, 32, 16, warps=1, stages=1, group=2)  # small, so that small shapes have many tiles


def arithmetic_of(dtype: torch.dtype, fp32_precision: str) -> str:
    """half | tf32 | ieee. Raises ValueError for a dtype the kernels do not have."""
    if dtype in (torch.bfloat16, torch.float16):
        return "half"
    if dtype != torch.float32:
        raise ValueError(
            f"the Triton kernels take bfloat16, float16 and float32 features, not {dtype}; cast them or use backend=tiled"
        )
    if fp32_precision not in ("ieee", "tf32"):
        raise ValueError(f"fp32_precision is {fp32_precision!r}; choose ieee or tf32")
    return fp32_precision


def tiles_for(capability: int, kernel_pass: str, arithmetic: str) -> Tiles:
    """The table's entry for a compute capability (90 for 9.0), or the default where it has none."""
    return IEEE if arithmetic == "ieee" else TABLE.get(capability, AMPERE)[kernel_pass, arithmetic]


def tiles_on(device: torch.device, kernel_pass: str, arithmetic: str) -> Tiles:
    """The tiles for a device. Raises ValueError for the CPU unless Triton's interpreter is on."""
    if device.type == "cuda":
        return tiles_for(_capability(device), kernel_pass, arithmetic)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return INTERPRETER
    raise ValueError(
        f"the Triton kernels need a CUDA device, not {device}; use backend=tiled, or set TRITON_INTERPRET=1 before the start"
    )


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
