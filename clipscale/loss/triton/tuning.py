"""The choices of the Triton backend: one table of tile shapes, by architecture, pass and arithmetic, and what a caller may vary.

The tests compile every entry ahead of time and check registers, shared memory and tensor-core instructions. The choice between entries
that pass is by reasoning, not yet by measurement; `clipscale bench loss methods=triton,triton-tiles-128x256x64-8w-3s` measures others.
The table is fixed, not tuned at run time, so that two machines of a kind, and two runs, add in the same order.

    sm_90: 128 x 128 with 8 warps held to 128 registers a thread, so that two programs share a multiprocessor and one's exponentials
    overlap the other's matmul.
    sm_80 and the default: 4 warps with up to 255 registers, for the same two programs. Shared memory stays under the 99 KB of sm_86,
    sm_89 and sm_120.
    sm_100: the accumulators are in tensor memory with a row to a thread, so column sums cross all lanes; the forward kernels need more
    registers than two programs leave.
    The sigmoid's value and gradients in one sweep take more registers than two programs leave.
    IEEE float32 has no tensor cores: 64 x 64.
"""

import itertools
import re
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
    group: int = 8  # tile rows visited together

    def __str__(self) -> str:
        """As in 128x256x64-8w-3s-168r."""
        limit = f"-{self.registers}r" if self.registers else ""
        return f"{self.rows}x{self.cols}x{self.depth}-{self.warps}w-{self.stages}s{limit}"

    @classmethod
    def parse(cls, text: str) -> "Tiles | None":
        """The inverse of str(); None where the text is no tile shape."""
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+)-(\d+)w-(\d+)s(?:-(\d+)r)?", text)
        return cls(*(int(x) if x else None for x in found.groups())) if found else None  # type: ignore[arg-type]


@dataclass(frozen=True)
class Tuning:
    """What a caller of the Triton backend may vary. Results change by rounding alone."""

    tiles: Tiles | None = None
    """Of every kernel; None: the table's entry."""
    panel_bytes: int = 512 << 20
    """Of score gradients at a time: a 16k x 16k panel in half precision, which keeps the library's GEMMs large."""
    partial_bytes: int = 128 << 20
    """Of partial sums at a time: a 32k x 32k panel with 128 x 128 tiles."""


PASSES = ("forward", "forward with keys", "backward", "backward with keys", "sigmoid", "sigmoid with keys")
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
    ("sigmoid", "half"): Tiles(128, 128, 32, warps=8, stages=3),
    ("sigmoid with keys", "half"): Tiles(128, 128, 32, warps=8, stages=3),
    ("sigmoid", "tf32"): Tiles(128, 128, 32, warps=8, stages=3),
    ("sigmoid with keys", "tf32"): Tiles(128, 128, 32, warps=8, stages=3),
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
    ("sigmoid", "half"): Tiles(128, 128, 64, warps=8, stages=3),
    ("sigmoid with keys", "half"): Tiles(128, 128, 64, warps=8, stages=3),
    ("sigmoid", "tf32"): Tiles(128, 128, 32, warps=8, stages=3),
    ("sigmoid with keys", "tf32"): Tiles(128, 128, 32, warps=8, stages=3),
}
BLACKWELL = HOPPER | {
    ("forward", "half"): Tiles(128, 128, 64, warps=8, stages=3),
    ("forward", "tf32"): Tiles(128, 128, 32, warps=8, stages=3),
}
TABLE = {80: AMPERE, 90: HOPPER, 100: BLACKWELL, 103: BLACKWELL}
INTERPRETER = Tiles(16, 32, 16, warps=1, stages=1, group=2)  # small, so that small shapes have many tiles


def arithmetic_of(dtype: torch.dtype, fp32_precision: str) -> str:
    """half | tf32 | ieee"""
    return "half" if dtype in (torch.bfloat16, torch.float16) else fp32_precision


def tiles_for(capability: int, kernel_pass: str, arithmetic: str) -> Tiles:
    """The table's entry for a compute capability (90 for 9.0), or the default where it has none."""
    return IEEE if arithmetic == "ieee" else TABLE.get(capability, AMPERE)[kernel_pass, arithmetic]


def tiles_on(device: torch.device, kernel_pass: str, arithmetic: str) -> Tiles:
    """The tiles for a device; on the CPU those of Triton's interpreter."""
    return tiles_for(_capability(device), kernel_pass, arithmetic) if device.type == "cuda" else INTERPRETER


def candidates(arithmetic: str) -> list[Tiles]:
    """Shapes worth measuring: every entry of the table for this arithmetic, and variations of tile, warps, stages and registers."""
    if arithmetic == "ieee":
        return [IEEE, Tiles(128, 64, 32, 8, 3), Tiles(128, 128, 16, 8, 3)]
    known = [t for entries in TABLE.values() for (_, kind), t in entries.items() if kind == arithmetic]
    depths = (32, 64) if arithmetic == "half" else (16, 32)
    shapes = itertools.product(((128, 128), (128, 256), (256, 128)), depths, (4, 8), (3, 4), (None, 128))
    varied = [Tiles(*tile, depth, warps, stages, limit) for tile, depth, warps, stages, limit in shapes]
    return list(dict.fromkeys(known + varied))


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
