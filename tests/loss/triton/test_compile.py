"""The kernels compiled ahead of time, without a GPU: for Ampere, Hopper and Blackwell, in each type, with and without
keys."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from clipscale.loss.triton.sigmoid import sigmoid_kernel
from clipscale.loss.triton.softmax import lse_kernel, merge_kernel, softmax_gradient_kernel
from clipscale.loss.triton.tuning import tiles_for

DOUBLES = ("lse", "row_lse", "col_lse")
KERNELS = [lse_kernel, softmax_gradient_kernel, sigmoid_kernel]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHARED = {80: 99, 90: 227, 100: 227}
"""KiB of shared memory that a program may have; for sm_80 as much as sm_86 and sm_89."""


def compiled(
    kernel: Any, capability: int, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int
) -> Any:
    """The binary for the arguments that a launch gives: aligned pointers and strides."""
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*fp64" if name in DOUBLES else "*fp32")
        for name in kernel.arg_names
    }
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.startswith("stride") or name == "depth"
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True},
    )


def spilled(cubin: bytes, folder: Path) -> tuple[int, int]:
    """Registers and stack bytes of a thread."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert match, printed
    return int(match[1]), int(match[2])


@pytest.mark.parametrize("keys", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["bf16", *(pytest.param(x, marks=pytest.mark.slow) for x in ("fp16", "fp32"))])
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_a_kernel_compiles_with_few_spills(kernel: Any, capability: int, form: str, keys: bool, tmp_path: Path) -> None:
    tiles, tma = tiles_for(capability, TYPES[form]), capability >= 90 and form != "fp32"
    shapes = {"u": (tiles.rows, tiles.depth), "v": (tiles.cols, tiles.depth), "panel": (tiles.rows, tiles.cols // 4)}
    types = {name: f"tensordesc<{form}{list(shape)}>" if tma else f"*{form}" for name, shape in shapes.items()}
    types |= dict.fromkeys(("n", "m", "depth", "stride_u", "stride_v", "stride_panel", "positive"), "i32")
    types |= dict.fromkeys(("row_keys", "col_keys"), "*i64")
    constants = {"TMA": tma, "BM": tiles.rows, "BN": tiles.cols, "BK": tiles.depth}
    constants |= {} if keys else {"row_keys": None, "col_keys": None}
    built = compiled(kernel, capability, types, constants, tiles.warps, tiles.stages)
    assert built.metadata.shared <= SHARED[capability] * 1024
    registers, stack = spilled(built.asm["cubin"], tmp_path)
    print(
        kernel.__name__, capability, form, keys, "registers", registers, "stack", stack, "shared", built.metadata.shared
    )
    assert stack <= 64, f"{registers} registers and {stack} bytes of stack a thread"


def test_the_merge_compiles() -> None:
    types = {"size": "i32", "lines": "i32"}
    for capability in SHARED:
        assert compiled(merge_kernel, capability, types, {"BLOCK": 128}, 4, 1).asm["cubin"]
