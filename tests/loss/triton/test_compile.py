"""The kernels compiled ahead of time, without a GPU: for Ampere, Hopper and Blackwell, in each type."""

import re
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from clipscale.loss.sigmoid.kernel import sigmoid_kernel
from clipscale.loss.softmax.kernel import join_kernel, lse_kernel, softmax_gradient_kernel
from clipscale.loss.triton.tuning import TileShape, tiles_for

KERNELS = [lse_kernel, join_kernel, softmax_gradient_kernel, sigmoid_kernel]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# KiB of shared memory that a program may have; for sm_80 as much as sm_86 and sm_89.
SHARED = {80: 99, 90: 227, 100: 227}
# Bytes of stack of a thread: the most.
SPILLED = {"fp32": 256, "fp16": 64, "bf16": 64}


def compiled(kernel: Any, capability: int, types: dict, constants: dict, **options: Any) -> Any:
    """The binary for the arguments that a launch gives: aligned pointers and strides."""
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.startswith("stride") or name == "depth"
    }
    source = ASTSource(kernel, signature, constants, aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options | {"enable_fp_fusion": True})


# Each kernel by Hopper's or Blackwell's descriptors, and one by Ampere's loads.
FEW = [
    (lse_kernel, 100, "bf16"),
    (join_kernel, 90, "bf16"),
    (softmax_gradient_kernel, 90, "bf16"),
    (sigmoid_kernel, 90, "bf16"),
    (sigmoid_kernel, 80, "bf16"),
]
EVERY = [*FEW, *(case for case in product(KERNELS, SHARED, TYPES) if case not in FEW)]


@pytest.mark.parametrize(
    ("kernel", "capability", "form"),
    [pytest.param(*case, marks=[] if case in FEW else pytest.mark.slow) for case in EVERY],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_kernel_compiles_and_spills_little(kernel: Any, capability: int, form: str, tmp_path: Path) -> None:
    tiles = tiles_for(capability, TYPES[form])
    assert stack(kernel, capability, form, tiles, tmp_path) <= SPILLED[form]


def stack(kernel: Any, capability: int, form: str, t: TileShape, folder: Path) -> int:
    """Bytes of stack of a thread, where registers are spilled to."""
    tma = capability >= 90 and form != "fp32"
    shapes = {"u": (t.rows, t.depth), "v": (t.cols, t.depth), "panel": (t.rows, t.cols // 4)}
    types = {name: f"tensordesc<{form}{list(shape)}>" if tma else f"*{form}" for name, shape in shapes.items()}
    types |= dict.fromkeys(
        ("n", "m", "lines", "depth", "stride_u", "stride_v", "stride_panel", "positive_offset"), "i32"
    )
    types["lse"] = "*fp64"
    constants = {"TMA": tma, "BM": t.rows, "BN": t.cols, "BK": t.depth, "BLOCK": 128}
    constants = {name: x for name, x in constants.items() if name in kernel.arg_names}
    options = {"num_warps": t.warps, "num_stages": t.stages, "maxnreg": t.registers}
    built = compiled(kernel, capability, types, constants, **options)
    assert built.metadata.shared <= SHARED[capability] * 1024
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(built.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match and int(match[1]) <= 65536 // (32 * t.warps), f"a multiprocessor has 65,536 registers: {usage}"
    print(f"{kernel.__name__} sm_{capability} {form} {t.rows}x{t.cols}: {match[0]}")
    return int(match[2])
