"""The choices of the Triton backend: one table of tile shapes, by architecture, pass and arithmetic, and what a caller may vary.

The tests compile every entry ahead of time and check registers, shared memory and tensor-core instructions. The choice between entries
that pass is by reasoning, not yet by measurement; others are measured by replacing the entry.
The table is fixed, not tuned at run time, so that two machines of a kind, and two runs, add in the same order.

    sm_90: by the static model (docs/loss.md) operands from L2 are what limits, so tiles are 128 x 256 and 256 x 128, one program a
    multiprocessor. Sigmoid and keys take more instructions an element: 128 registers a thread, so that two programs share a multiprocessor
    and one's epilogue overlaps the other's matmul.
    sm_80 and the default: shared memory stays under the 99 KB of sm_86, sm_89 and sm_120. 8 warps with up to 255 registers; the gradient
    fits 4 warps, and two programs.
    sm_100: the accumulators are in tensor memory with a row to a thread, so the forward kernel carries whole tiles of column sums, and
    needs more registers than two programs leave.
    IEEE float32 has no tensor cores: 64 x 64.
"""

import itertools
import re
from dataclasses import dataclass, replace
from functools import cache

import torch

RARE_SIDE = 128  # of a tile in kernels that are seldom run and take more registers
GLUON_ROWS = 128  # of a consumer in the warp-specialised kernels


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
    gluon: bool = False  # of the warp-specialised kernels

    def __str__(self) -> str:
        """As in 128x256x64-8w-3s-168r."""
        limit = f"-{self.registers}r" if self.registers else ""
        return f"{self.rows}x{self.cols}x{self.depth}-{self.warps}w-{self.stages}s{limit}{'-gluon' * self.gluon}"

    @property
    def plain(self) -> "Tiles":
        """For a plain kernel on the same tiles."""
        return replace(self, warps=8, gluon=False) if self.gluon else self

    @property
    def rare(self) -> "Tiles":
        """For kernels that are seldom run and take more registers."""
        return replace(self.plain, rows=min(self.rows, RARE_SIDE), cols=min(self.cols, RARE_SIDE), registers=None)

    @property
    def special(self) -> "Tiles":
        """For the few tiles with a positive, an edge or a far log-sum-exp, whose kernel takes more registers yet."""
        return replace(self.plain, rows=min(self.rows, RARE_SIDE), warps=8, registers=None)

    @property
    def col_lines(self) -> int:
        """Lines of column sums that a strip leaves: on Hopper one for each warp of a warp-specialised kernel."""
        return 8 if self.gluon and self.rows > GLUON_ROWS else 1

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
    gluon: bool = False
    """Warp-specialised kernels where there are any."""


PASSES = ("forward", "forward with keys", "backward", "backward with keys", "sigmoid", "sigmoid with keys")
IEEE = Tiles(64, 64, 32, warps=4, stages=3)


# (pass, arithmetic) -> tiles. With keys, a pass has masks that take registers.
def _entries(half: Tiles, tf32: Tiles, **others: Tiles) -> dict[tuple[str, str], Tiles]:
    """The entries of an architecture: one for all passes, and `others` for a pass in half precision."""
    entries = {(name, "half"): half for name in PASSES} | {(name, "tf32"): tf32 for name in PASSES}
    return entries | {(name.replace("_", " "), "half"): tiles for name, tiles in others.items()}


AMPERE = _entries(
    Tiles(128, 128, 32, warps=8, stages=3),
    Tiles(128, 128, 32, warps=8, stages=3),
    backward=Tiles(128, 128, 32, warps=4, stages=4),
)
HOPPER = _entries(
    Tiles(128, 128, 64, warps=8, stages=3, registers=128),
    Tiles(128, 128, 32, warps=8, stages=3),
    forward=Tiles(128, 256, 64, warps=8, stages=3),
    backward=Tiles(256, 128, 64, warps=8, stages=3),
    forward_with_keys=Tiles(128, 64, 64, warps=8, stages=3, registers=128),
    backward_with_keys=Tiles(128, 64, 64, warps=8, stages=3, registers=128),
    sigmoid_with_keys=Tiles(128, 64, 64, warps=8, stages=3, registers=128),
)
BLACKWELL = _entries(
    Tiles(128, 128, 64, warps=8, stages=3),
    Tiles(128, 128, 32, warps=8, stages=3),
    forward_with_keys=Tiles(128, 64, 64, warps=8, stages=3),
    backward_with_keys=Tiles(128, 64, 64, warps=8, stages=3),
)
# Of other GPUs, which have 99 KiB of shared memory for a program: sm_86 and sm_89, and sm_120 with its tensor descriptors.
DEFAULT = AMPERE | {(name, "tf32"): Tiles(128, 128, 32, warps=8, stages=2) for name in PASSES}
TABLE = {80: AMPERE, 90: HOPPER, 100: BLACKWELL, 103: BLACKWELL}
# Warp-specialised kernels; rows are those of all consumers. By the static model.
GLUON = {90: Tiles(256, 128, 64, 4, 3, gluon=True), 100: Tiles(128, 128, 64, 4, 3, gluon=True)}
GLUON[103] = GLUON[100]
INTERPRETER = Tiles(16, 32, 32, warps=1, stages=1, group=2)  # small, so that small shapes have many tiles


def arithmetic_of(dtype: torch.dtype, fp32_precision: str) -> str:
    """half | tf32 | ieee"""
    return "half" if dtype in (torch.bfloat16, torch.float16) else fp32_precision


def tiles_for(capability: int, kernel_pass: str, arithmetic: str) -> Tiles:
    """The table's entry for a compute capability (90 for 9.0), or the default where it has none."""
    return IEEE if arithmetic == "ieee" else TABLE.get(capability, DEFAULT)[kernel_pass, arithmetic]


def gluon_tiles(capability: int, kernel_pass: str, arithmetic: str) -> Tiles | None:
    """The tiles of a pass's warp-specialised kernel; None where it has none."""
    return GLUON.get(capability) if arithmetic == "half" and "keys" not in kernel_pass else None


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
def capability_of(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
