"""The Triton kernels compiled ahead of time, without a GPU, for every entry of the tile table: what the binaries use.

It shows that nothing spills, that the tiles fit and that the tensor cores are used. It does not show speed.
"""

import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from clipscale.loss.block import Block, Parameters, RowBlock
from clipscale.loss.machine import Machine
from clipscale.loss.objective import Sigmoid, Softmax
from clipscale.loss.triton.backend import triton_backend
from clipscale.loss.triton.panels import MERGED_LINES, MERGED_WIDTH
from clipscale.loss.triton.sigmoid import sigmoid_kernel
from clipscale.loss.triton.softmax import lse_kernel, merge_kernel, softmax_gradient_kernel
from clipscale.loss.triton.tuning import AMPERE, PASSES, TABLE, Tiles, Tuning, tiles_for

ROOT = Path(__file__).parents[3]
OTHER = "CLIPSCALE_OTHER_TRITON"
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # a program may have, of the multiprocessor's
SMALLEST_SHARED = 99 * 1024  # sm_86, sm_89, sm_120, which take the default entries
# Bytes a thread. Triton 3.6 keeps a few load addresses of the forward kernel on the stack, written and read once a tile.
SPILLED = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 64
SPILLED_ON_BLACKWELL = 160  # by variants that training seldom uses (one direction alone, TF32), read back once a tile
REGISTERS = 64 * 1024  # of a multiprocessor
MATRIX_INSTRUCTION = {80: "mma.sync.aligned", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
ELEMENT = {"bf16": "half", "fp16": "half", "tf32": "tf32", "ieee": "ieee"}

SOFTMAX = {"ROWS": True, "COLS": True}
PLAIN_GRADIENT = {"SMOOTH": False, "STORE": True, "KEYS": False}
VALUE = {"VALUE": True, "GRADIENT": False, "STORE": False}
ONE_SWEEP = {"VALUE": True, "GRADIENT": True, "STORE": True}
PLAIN = {
    "lse": (lse_kernel, "forward", SOFTMAX | {"KEYS": False}),
    "softmax gradient": (
        softmax_gradient_kernel,
        "backward",
        SOFTMAX | PLAIN_GRADIENT,
    ),
    "sigmoid loss": (sigmoid_kernel, "sigmoid", VALUE | {"KEYS": False}),
    "sigmoid gradient": (sigmoid_kernel, "sigmoid", ONE_SWEEP | {"KEYS": False}),
}
LOADED = {
    "lse, keys": (lse_kernel, "forward with keys", SOFTMAX | {"KEYS": True}),
    "softmax gradient, keys, smoothing": (
        softmax_gradient_kernel,
        "backward with keys",
        SOFTMAX | {"SMOOTH": True, "STORE": True, "KEYS": True},
    ),
}
REST = {
    "lse, rows": (lse_kernel, "forward", {"ROWS": True, "COLS": False, "KEYS": False}),
    "softmax gradient, rows": (softmax_gradient_kernel, "backward", PLAIN_GRADIENT | {"ROWS": True, "COLS": False}),
    "softmax gradient, columns": (softmax_gradient_kernel, "backward", PLAIN_GRADIENT | {"ROWS": False, "COLS": True}),
    "sigmoid loss, keys": (sigmoid_kernel, "sigmoid with keys", VALUE | {"KEYS": True}),
    "softmax gradient, smoothing": (softmax_gradient_kernel, "backward", SOFTMAX | PLAIN_GRADIENT | {"SMOOTH": True}),
    "sigmoid gradient, keys": (sigmoid_kernel, "sigmoid with keys", ONE_SWEEP | {"KEYS": True}),
    "sigmoid gradient alone": (sigmoid_kernel, "sigmoid", ONE_SWEEP | {"VALUE": False, "KEYS": False}),
}  # fmt: skip
KERNELS: dict[str, Any] = PLAIN | LOADED | REST
COMMON = [("bf16", name) for name in PLAIN | LOADED] + [
    (form, name) for form in ("tf32", "ieee") for name in list(PLAIN)[:2]
]
OTHERS = [(form, name) for form in ELEMENT for name in KERNELS if (form, name) not in COMMON]


class Binary(NamedTuple):
    """A compiled kernel: its resources and its code."""

    registers: int
    stack: int  # bytes a thread spills
    shared: int  # bytes a program
    ptx: str
    tiles: Tiles


def compiled(kernel: Any, capability: int, tiles: Tiles, dtype: str, constants: dict[str, Any]) -> Binary:
    """The kernel for aligned operands, as the launches have them."""
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in ("u", "v", "panel"):
            signature[name] = f"*{dtype}"
        elif name.endswith("_keys"):
            signature[name] = "*i64"
        elif name in ("hard_target", "row_constant", "col_constant"):
            signature[name] = "fp32"
        elif name in ("n", "m", "depth", "positive", "lines", "length") or name.startswith("stride"):
            signature[name] = "i32"
        else:
            signature[name] = "*fp32"
        if signature[name].startswith("*") or name == "depth" or name.startswith("stride"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    options = {
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "maxnreg": tiles.registers,
        "enable_fp_fusion": True,
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Binary(*resources(built.asm["cubin"]), built.metadata.shared, built.asm["ptx"], tiles)


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
    kernel, kernel_pass, flags = KERNELS[name]
    tiles = tiles_for(capability, kernel_pass, ELEMENT[form])
    shape = {"BM": tiles.rows, "BN": tiles.cols, "BK": tiles.depth, "GROUP": tiles.group}
    precision = {"PRECISION": "tf32" if form == "tf32" else "ieee"}
    dtype = form if ELEMENT[form] == "half" else "fp32"
    return compiled(kernel, capability, tiles, dtype, flags | precision | shape)


def check(capability: int, form: str, name: str) -> None:
    binary = entry(capability, form, name)
    case = f"{name} in {form} on sm_{capability} with {binary.tiles}: {binary.registers} registers, {binary.stack} bytes of stack"
    rare = capability == 100 and (form, name) not in COMMON
    assert binary.stack <= (SPILLED_ON_BLACKWELL if rare else SPILLED), f"spills: {case}"
    assert binary.shared <= SHARED_BYTES[capability], f"{binary.shared} bytes of shared memory: {case}"
    if binary.tiles in AMPERE.values() or form == "ieee":
        assert binary.shared <= SMALLEST_SHARED, (
            f"{binary.shared} bytes of shared memory, and this is the default entry: {case}"
        )
    if form != "ieee":
        assert MATRIX_INSTRUCTION[capability] in binary.ptx, f"no {MATRIX_INSTRUCTION[capability]}: {case}"
    copies = re.findall(r"cp\.async\.\S+ .*?, 0x(\w+)", binary.ptx)
    assert copies and set(copies) == {"10"}, f"operands are not copied 16 bytes at a time but {set(copies)}: {case}"
    if name.startswith(("softmax gradient", "sigmoid gradient")):
        assert "st.global.v4.b32" in binary.ptx, f"the gradient is not stored 16 bytes at a time: {case}"
        assert "st.global.b16" not in binary.ptx, f"the gradient is stored 2 bytes at a time: {case}"


@pytest.mark.parametrize(("form", "name"), COMMON)
@pytest.mark.parametrize("capability", sorted(SHARED_BYTES))
def test_the_kernel_fits_spills_nothing_and_uses_the_tensor_cores(capability: int, form: str, name: str) -> None:
    check(capability, form, name)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "name"), OTHERS)
@pytest.mark.parametrize("capability", sorted(SHARED_BYTES))
def test_so_do_the_rarer_variants(capability: int, form: str, name: str) -> None:
    check(capability, form, name)


@pytest.mark.parametrize("name", ["lse", "softmax gradient"])
def test_two_programs_share_a_hopper_multiprocessor(name: str) -> None:
    """The exponentials of one then overlap the matmul of the other: the reason for the entries' register limit."""
    binary = entry(90, "bf16", name)
    threads = 32 * binary.tiles.warps
    assert 2 * threads * binary.registers <= REGISTERS, f"{binary.registers} registers of {threads} threads"
    assert 2 * (binary.shared + 1024) <= 228 * 1024, f"{binary.shared} bytes of shared memory"


def test_the_merge_kernel_compiles_everywhere() -> None:
    for capability in SHARED_BYTES:
        constants = {"LINES": MERGED_LINES, "WIDTH": MERGED_WIDTH}
        binary = compiled(merge_kernel, capability, Tiles(0, 0, 0, warps=4, stages=2), "fp32", constants)
        assert binary.stack == 0, f"spills {binary.stack} bytes on sm_{capability}"


class NoDevice:
    """A driver that has a target to compile for and runs nothing."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class CompilesForHopper(Machine):
    """Compiles what it is given to launch, with the tiles of sm_90."""

    def __init__(self) -> None:
        self.compiled: dict[str, set[str]] = {}

    def tiles(self, device: torch.device, kernel_pass: str, arithmetic: str) -> Tiles:
        return tiles_for(90, kernel_pass, arithmetic)

    def launch(self, kernel: Any, grid: int, device: torch.device, tiles: Tiles, *given: Any, **constants: Any) -> None:
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "maxnreg": tiles.registers}
        built = kernel.run(*given, grid=(grid,), warmup=True, **constants, **options, enable_fp_fusion=True)
        self.compiled.setdefault(kernel.__name__, set()).add(built.hash)
        if kernel is not merge_kernel:
            assert set(re.findall(r"cp\.async\.\S+ .*?, 0x(\w+)", built.asm["ptx"])) == {"10"}, kernel.__name__


def test_the_launches_bind_and_compile_as_the_host_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments in the kernels' order, alignment seen by Triton, few variants: sizes and positions do not make new ones."""
    monkeypatch.setattr(driver, "_active", NoDevice())
    machine = CompilesForHopper()
    softmax, sigmoid = (triton_backend(x, "ieee", Tuning(), machine) for x in (Softmax(), Sigmoid()))
    for n, m, positive in ((501, 300, 0), (1, 501, -16), (501, 16, None)):
        rows, cols = (
            RowBlock(torch.zeros(size, 123, dtype=torch.float16), weight=torch.zeros(size), grad=torch.zeros(size, 123))
            for size in (n, m)
        )
        rows.target = torch.zeros(n, dtype=torch.float64)
        rows.lse, cols.lse = rows.empty_lse(), cols.empty_lse()
        block = Block(rows, cols, Parameters(torch.tensor(10.0), torch.tensor(10.0)), positive)
        softmax.forward(block)
        softmax.backward(block)
        sigmoid.forward_backward(block)
    names = ("lse_kernel", "merge_kernel", "softmax_gradient_kernel", "sigmoid_kernel")
    assert {name: len(variants) for name, variants in machine.compiled.items()} == dict.fromkeys(names, 1)


def test_every_architecture_has_an_entry_for_every_pass() -> None:
    for capability in (*TABLE, 75, 86, 89, 120):
        for kernel_pass in PASSES:
            for arithmetic in ("half", "tf32", "ieee"):
                assert tiles_for(capability, kernel_pass, arithmetic).rows


@pytest.mark.slow
@pytest.mark.skipif(OTHER not in os.environ, reason=f"{OTHER} names no folder with another version of Triton")
def test_another_version_of_triton_compiles_the_kernels() -> None:
    """For example the oldest allowed: pip install --target FOLDER --no-deps triton==3.6.0"""
    folder = os.environ[OTHER]
    paths = os.pathsep.join([folder, str(ROOT)])
    env = {name: x for name, x in os.environ.items() if name != OTHER} | {"PYTHONPATH": paths}
    version = [sys.executable, "-c", "import triton; print(triton.__file__)"]
    assert subprocess.run(version, env=env, capture_output=True, text=True, check=True).stdout.startswith(folder)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/loss/triton/test_compile.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
