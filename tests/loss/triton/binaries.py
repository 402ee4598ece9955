"""The Triton kernels compiled ahead of time, without a GPU: every variant that is launched, in its entry of the tile table."""

import re
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from clipscale.loss.triton.gluon_kernels import gluon_lse_kernel, gluon_sigmoid_kernel, gluon_softmax_gradient_kernel
from clipscale.loss.triton.panels import shared_slots
from clipscale.loss.triton.sigmoid import sigmoid_kernel
from clipscale.loss.triton.softmax import (
    OWN,
    SUMS,
    TOPS,
    kept_gradient_kernel,
    lse_kernel,
    softmax_gradient_kernel,
    special_gradient_kernel,
)
from clipscale.loss.triton.tuning import GLUON, GLUON_ROWS, RARE_SIDE, Tiles, tiles_for

REGISTERS = 64 * 1024  # of a multiprocessor
ELEMENT = {"bf16": "half", "fp16": "half", "tf32": "tf32", "ieee": "ieee"}

SOFTMAX = {"ROWS": True, "COLS": True, "KEYS": False}
SUM = SOFTMAX | {"FIND": SUMS, "EDGE": False, "KEEP": False}
GRADIENT = SOFTMAX | {"SMOOTH": False, "STORE": True}
VALUE = {"VALUE": True, "GRADIENT": False, "STORE": False, "KEYS": False}
ONE_SWEEP = {"VALUE": True, "GRADIENT": True, "STORE": True, "KEYS": False}
KEYS = {"KEYS": True}
# name: kernel, pass, constants
PLAIN = {
    "lse": (lse_kernel, "forward", SUM),
    "softmax gradient": (softmax_gradient_kernel, "backward", GRADIENT),
    "sigmoid gradient": (sigmoid_kernel, "sigmoid", ONE_SWEEP),
}
LOADED = {
    "lse, keys": (lse_kernel, "forward with keys", SUM | KEYS),
    "softmax gradient, keys": (softmax_gradient_kernel, "backward with keys", GRADIENT | KEYS),
}
KEPT = {
    "lse, kept": (lse_kernel, "forward", SUM | {"KEEP": True}),
    "kept gradient": (kept_gradient_kernel, "backward", {"COLS": True, "STORE": True}),
}
# Of few tiles: with as many registers as there are.
FREE = {
    "lse, edge": (lse_kernel, "forward", SUM | {"EDGE": True}),
    "lse, own references": (lse_kernel, "forward", SUM | {"FIND": OWN, "EDGE": True}),
    "largest scores": (lse_kernel, "forward", SUM | {"FIND": TOPS, "EDGE": True}),
    "softmax gradient, special": (special_gradient_kernel, "backward", GRADIENT),
}
REST = {
    "lse, rows": (lse_kernel, "forward", SUM | {"COLS": False}),
    "sigmoid loss": (sigmoid_kernel, "sigmoid", VALUE),
    "softmax gradient, rows": (softmax_gradient_kernel, "backward", GRADIENT | {"COLS": False}),
    "softmax gradient, columns": (softmax_gradient_kernel, "backward", GRADIENT | {"ROWS": False}),
    "softmax gradient, smoothing": (softmax_gradient_kernel, "backward", GRADIENT | {"SMOOTH": True}),
    "softmax gradient, special, keys": (
        special_gradient_kernel,
        "backward with keys",
        GRADIENT | KEYS | {"SMOOTH": True},
    ),
    "sigmoid gradient, keys": (sigmoid_kernel, "sigmoid with keys", ONE_SWEEP | KEYS),
    "sigmoid gradient alone": (sigmoid_kernel, "sigmoid", ONE_SWEEP | {"VALUE": False}),
}
KERNELS: dict[str, Any] = PLAIN | LOADED | KEPT | FREE | REST
# Warp-specialised: kernel, constants
BOTH = {"ROWS": True, "COLS": True}
GLUONS: dict[str, Any] = {
    "lse, gluon": (gluon_lse_kernel, BOTH),
    "softmax gradient, gluon": (gluon_softmax_gradient_kernel, BOTH | {"SMOOTH": False}),
    "sigmoid gradient, gluon": (gluon_sigmoid_kernel, {}),
    "lse, rows, gluon": (gluon_lse_kernel, BOTH | {"COLS": False}),
    "softmax gradient, smoothing, gluon": (gluon_softmax_gradient_kernel, BOTH | {"SMOOTH": True}),
}


class Binary(NamedTuple):
    """A compiled kernel: its resources and its code."""

    registers: int
    stack: int  # bytes a thread spills
    shared: int  # bytes a program
    ptx: str
    tiles: Tiles
    cubin: bytes


def compiled(kernel: Any, capability: int, tiles: Tiles, dtype: str, constants: dict[str, Any]) -> Binary:
    """A plain kernel for aligned operands, as the launches have them."""
    shapes = {"u": (tiles.rows, tiles.depth), "v": (tiles.cols, tiles.depth)}
    stored = {"panel": constants.get("STORE"), "kept": constants.get("KEEP", kernel is kept_gradient_kernel)}
    shapes |= dict.fromkeys(stored, (tiles.rows, tiles.cols // 4))
    described = capability >= 90 and (dtype != "fp32" or constants["PRECISION"] == "tf32")
    types = {
        name: (f"tensordesc<{dtype}{list(shape)}>" if described else f"*{dtype}") if stored.get(name, True) else "*fp32"
        for name, shape in shapes.items()
    }
    constants = constants | {"TMA": described, "PAIRS": capability // 10 != 10}
    options = {"num_stages": tiles.stages, "maxnreg": tiles.registers}
    return binary_of(ASTSource, kernel, capability, tiles, types, constants, options)


def binary_of(
    source: Any, kernel: Any, capability: int, tiles: Tiles, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any]
) -> Binary:  # fmt: skip
    """The kernel, whose arguments have the given types, or those that their names tell."""

    def type_of(name: str) -> str:
        if name.endswith("_keys") or name == "enabled":
            return "*i32"
        is_number = name in ("n", "m", "depth", "positive", "strips", "kept_rows") or name.startswith("stride")
        return "*i8" if name.endswith("_low") else "i32" if is_number else "*fp32"

    constants = {name: x for name, x in constants.items() if name in kernel.arg_names}
    signature = {x: "constexpr" if x in constants else types[x] if x in types else type_of(x) for x in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, type_) in enumerate(signature.items())
        if type_.startswith("*") or name == "depth" or name.startswith("stride")
    }
    options = {"num_warps": tiles.warps, "enable_fp_fusion": True} | options
    target = GPUTarget("cuda", capability, 32)
    built = triton.compile(source(kernel, signature, constants, aligned), target=target, options=options)
    return Binary(*resources(built.asm["cubin"]), built.metadata.shared, built.asm["ptx"], tiles, built.asm["cubin"])


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes a thread, as the binary says."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found, printed
    return int(found[1]), int(found[2])


@cache
def entry(capability: int, form: str, name: str) -> Binary:
    """A kernel in its entry of the table."""
    tiles = tiles_for(capability, KERNELS[name][1], ELEMENT[form])
    height = tiles.rows
    if "special" in name:
        tiles = tiles.special
    elif name in FREE:
        tiles = replace(tiles, cols=min(tiles.cols, RARE_SIDE), registers=None)
    return compiled_entry(name, capability, form, tiles, height)


def compiled_entry(name: str, capability: int, form: str, tiles: Tiles, height: int | None = None) -> Binary:
    """The same with other tiles, of which special ones have a `height`."""
    kernel, _, flags = KERNELS[name]
    shape = {
        "BM": tiles.rows,
        "BN": tiles.cols,
        "BK": tiles.depth,
        "GROUP": tiles.group,
        "HEIGHT": height or tiles.rows,
    }
    precision = {"PRECISION": "tf32" if form == "tf32" else "ieee"}
    return compiled(kernel, capability, tiles, form if ELEMENT[form] == "half" else "fp32", flags | precision | shape)


def stores(name: str) -> bool:
    """Whether a warp-specialised kernel has buffers for what it stores."""
    return "gradient" in name


@cache
def gluon_entry(capability: int, form: str, name: str, width: int = 768) -> Binary:
    """A warp-specialised kernel in its entry of the table, for features of this width."""
    kernel, constants = GLUONS[name]
    tiles = GLUON[capability]
    blocks = {"u": (GLUON_ROWS, tiles.depth), "v": (tiles.cols, tiles.depth), "panel": (GLUON_ROWS, tiles.cols // 4)}
    constants = constants | {"BM": GLUON_ROWS, "BN": tiles.cols, "BK": tiles.depth}
    constants |= {"HALVES": tiles.rows // GLUON_ROWS, "STAGES": tiles.stages}
    constants |= shared_slots(tiles, width // tiles.depth, stores(name))
    types = {
        x: f"tensordesc<{form}{list(shape)},{NVMMASharedLayout(min(128, 2 * shape[1]), 16, 2)!r}>"
        for x, shape in blocks.items()
    }
    return binary_of(GluonASTSource, kernel, capability, tiles, types, constants, {})
