"""The Triton kernels compiled ahead of time, without a GPU, for every entry of the tile table: what the binaries use.

It shows that nothing spills, that the tiles fit and that the tensor cores are used. It does not show speed.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from clipscale.loss.block import Block, Parameters, RowBlock
from clipscale.loss.kept import Kept
from clipscale.loss.machine import Machine
from clipscale.loss.objective import Sigmoid, Softmax
from clipscale.loss.triton import backend
from clipscale.loss.triton.backend import triton_backend
from clipscale.loss.triton.tuning import PASSES, TABLE, Tiles, Tuning, tiles_for
from tests.loss.triton.binaries import ELEMENT, GLUONS, KERNELS, LOADED, PLAIN, REGISTERS, entry, gluon_entry
from tests.loss.triton.model import MATRIX, loops_of

ROOT = Path(__file__).parents[3]
OTHER = "CLIPSCALE_OTHER_TRITON"
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # a program may have, of the multiprocessor's
SMALLEST_SHARED = 99 * 1024  # sm_86, sm_89, sm_120, which take the default entries
# Bytes a thread. Triton 3.6 keeps a few load addresses of the forward kernel on the stack, written and read once a tile.
SPILLED = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 64
SPILLED_ON_BLACKWELL = 160  # by variants that training seldom uses (one direction alone, TF32), read back once a tile
# Of the special kernel with keys in TF32, for tiles on the diagonal alone.
KEYS_IN_TF32 = ("tf32", "softmax gradient, special, keys")
SPILLED_WITH_KEYS = {80: 32, 90: 0, 100: 280}
# Of warp-specialised kernels: the thread's number and a few addresses, which are read once a tile, never in the loop over D.
GLUON_STACK, SMOOTHING_STACK = 24, 40
MATRIX_INSTRUCTION = {80: "mma.sync.aligned", 90: "wgmma.mma_async", 100: "tcgen05.mma"}

COMMON = [("bf16", name) for name in PLAIN | LOADED] + [
    (form, name) for form in ("tf32", "ieee") for name in list(PLAIN)[:2]
]
OTHERS = [(form, name) for form in ELEMENT for name in KERNELS if (form, name) not in COMMON]


def check(capability: int, form: str, name: str) -> None:
    binary = entry(capability, form, name)
    case = f"{name} in {form} on sm_{capability} with {binary.tiles}: {binary.registers} registers, {binary.stack} bytes of stack"
    rare = capability == 100 and (form, name) not in COMMON
    kept = 8 if form == "ieee" else 0  # of the stack, with registers to spare: no spill
    allowed = SPILLED_ON_BLACKWELL if rare else SPILLED
    if (form, name) == KEYS_IN_TF32:
        allowed = SPILLED_WITH_KEYS[capability]
    assert binary.stack <= max(kept, allowed), f"spills: {case}"
    assert binary.shared <= SHARED_BYTES[capability], f"{binary.shared} bytes of shared memory: {case}"
    if form == "ieee":  # which every GPU takes
        assert binary.shared <= SMALLEST_SHARED, f"{binary.shared} bytes of shared memory: {case}"
    if form != "ieee" and name != "kept gradient":
        assert MATRIX_INSTRUCTION[capability] in binary.ptx, f"no {MATRIX_INSTRUCTION[capability]}: {case}"
    described = capability >= 90 and form != "ieee"
    if described or name != "kept gradient":  # which has nothing to compute while it loads
        assert_copies_are_asynchronous(binary.ptx, described, case)
    if name.startswith(("softmax gradient", "sigmoid gradient", "kept gradient")):
        stored = "cp.async.bulk.tensor.2d.global.shared" if described else "st.global.v4.b32"
        assert stored in binary.ptx, f"the gradient is not stored by {stored}: {case}"
        assert "st.global.b16" not in binary.ptx, f"the gradient is stored 2 bytes at a time: {case}"


def assert_copies_are_asynchronous(ptx: str, described: bool, case: str) -> None:
    """By tensor descriptors, or 16 bytes at a time."""
    if described:
        assert "cp.async.bulk.tensor.2d.shared" in ptx, f"operands are not loaded by tensor descriptors: {case}"
        return
    copies = set(re.findall(r"cp\.async\.\S+ .*?, 0x(\w+)", ptx))
    assert copies == {"10"}, f"operands are not copied 16 bytes at a time but {copies}: {case}"


@pytest.mark.parametrize(("form", "name"), COMMON)
@pytest.mark.parametrize("capability", sorted(SHARED_BYTES))
def test_the_kernel_fits_spills_nothing_and_uses_the_tensor_cores(capability: int, form: str, name: str) -> None:
    check(capability, form, name)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "name"), OTHERS)
@pytest.mark.parametrize("capability", sorted(SHARED_BYTES))
def test_so_do_the_rarer_variants(capability: int, form: str, name: str) -> None:
    check(capability, form, name)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "name"), [(form, name) for form in ("bf16", "tf32") for name in KERNELS])
@pytest.mark.parametrize("capability", [89, 120])
def test_the_default_entries_fit_gpus_with_less_shared_memory(capability: int, form: str, name: str) -> None:
    assert entry(capability, form, name).shared <= SMALLEST_SHARED


@pytest.mark.slow  # seconds each
@pytest.mark.parametrize("form", ["bf16", "fp16"])
@pytest.mark.parametrize("name", GLUONS)
@pytest.mark.parametrize("capability", [90, 100])
def test_the_warp_specialised_kernels_fit_and_use_what_they_are_for(capability: int, form: str, name: str) -> None:
    """Tensor cores, copies by TMA that end at a barrier, and warps of several kinds: on Hopper with registers of their own."""
    binary = gluon_entry(capability, form, name)
    case = f"{name} in {form} on sm_{capability}: {binary.registers} registers, {binary.stack} bytes of stack"
    assert binary.stack <= (SMOOTHING_STACK if "smoothing" in name else GLUON_STACK), f"spills: {case}"
    names, loops = loops_of(binary.cubin)
    step = next(found for found in (names[a : b + 1] for a, b in loops) if any(MATRIX.match(x) for x in found))
    assert not {"LDL", "STL"} & set(step), f"spills in the loop over D: {case}"
    assert binary.shared <= SHARED_BYTES[capability], f"{binary.shared} bytes of shared memory: {case}"
    expected = [MATRIX_INSTRUCTION[capability], "cp.async.bulk.tensor.2d.shared", "mbarrier.try_wait"]
    expected += ["setmaxnreg"] if capability == 90 else ["tcgen05.ld", "tcgen05.commit"]
    expected += ["cp.async.bulk.tensor.2d.global.shared"] if "gradient" in name else []
    for instruction in expected:
        assert instruction in binary.ptx, f"no {instruction}: {case}"


@pytest.mark.parametrize("name", ["sigmoid gradient", *LOADED])
def test_two_programs_share_a_hopper_multiprocessor(name: str) -> None:
    """The epilogue of one then overlaps the matmul of the other: the reason for the entries' register limit."""
    binary = entry(90, "bf16", name)
    threads = 32 * binary.tiles.warps
    assert 2 * threads * binary.registers <= REGISTERS, f"{binary.registers} registers of {threads} threads"
    assert 2 * (binary.shared + 1024) <= 228 * 1024, f"{binary.shared} bytes of shared memory"


@pytest.mark.parametrize("name", ["lse", "softmax gradient"])
def test_one_program_a_multiprocessor_has_a_wide_tile(name: str) -> None:
    """Operands come from L2, which is the slowest unit of the static model: 128 x 256 reads a quarter less than two of 128 x 128."""
    tiles = entry(90, "bf16", name).tiles
    assert tiles.rows * tiles.cols >= 128 * 256, str(tiles)


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

    def compute_capability(self, device: torch.device) -> int:
        return 90

    def tiles(self, device: torch.device, kernel_pass: str, arithmetic: str) -> Tiles:
        return tiles_for(90, kernel_pass, arithmetic)

    def launch(self, kernel: Any, grid: int, device: torch.device, tiles: Tiles, *given: Any, **constants: Any) -> None:
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "maxnreg": tiles.registers}
        built = kernel.run(*given, grid=(grid,), warmup=True, **constants, **options, enable_fp_fusion=True)
        self.compiled.setdefault(kernel.__name__, set()).add(built.hash)
        assert_copies_are_asynchronous(built.asm["ptx"], True, kernel.__name__)


def block_of(n: int, m: int, width: int, positive: int | None = 0, dtype: torch.dtype = torch.float16) -> Block:
    """A block of ones for the backward and the forward pass."""
    rows, cols = (
        RowBlock(torch.ones(size, width, dtype=dtype), weight=torch.ones(size), grad=torch.zeros(size, width))
        for size in (n, m)
    )
    rows.target = torch.zeros(n, dtype=torch.float64)
    rows.lse, cols.lse = rows.empty_lse(), cols.empty_lse()
    return Block(rows, cols, Parameters(torch.tensor(10.0), torch.tensor(1.0)), positive)


# Of lse_kernel: what it finds three times, whole tiles and the columns past them. The warp-specialised kernel finds one of these.
COUNTS = {
    False: {"lse_kernel": 6, "softmax_gradient_kernel": 1, "special_gradient_kernel": 1, "sigmoid_kernel": 1},
    True: {"lse_kernel": 5, "special_gradient_kernel": 1}
    | dict.fromkeys(("gluon_lse_kernel", "gluon_softmax_gradient_kernel", "gluon_sigmoid_kernel"), 1),
}


@pytest.mark.parametrize("gluon", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_launches_bind_and_compile_as_the_host_makes_them(gluon: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments in the kernels' order, alignment seen by Triton, few variants: sizes and positions do not make new ones."""
    monkeypatch.setattr(driver, "_active", NoDevice())
    machine = CompilesForHopper()
    softmax, sigmoid = (triton_backend(x, "ieee", Tuning(gluon=gluon), machine) for x in (Softmax(), Sigmoid()))
    for n, m, positive in ((501, 300, 0), (1, 501, -16), (300, 256, None)):
        block = block_of(n, m, 123, positive)
        softmax.forward(block)
        softmax.backward(block)
        sigmoid.forward_backward(block)
    assert {name: len(variants) for name, variants in machine.compiled.items()} == COUNTS[gluon]


class Launches(Machine):
    """Notes which variants of the kernels are launched, and runs nothing."""

    def __init__(self, is_hopper: bool) -> None:
        self.variants: set[str] = set()
        self.is_hopper = is_hopper

    def compute_capability(self, device: torch.device) -> int:
        return 90 if self.is_hopper else super().compute_capability(device)

    def tiles(self, device: torch.device, kernel_pass: str, arithmetic: str) -> Tiles:
        return (
            tiles_for(90, kernel_pass, arithmetic) if self.is_hopper else super().tiles(device, kernel_pass, arithmetic)
        )

    def launch(self, kernel: Any, grid: int, device: torch.device, tiles: Tiles, *given: Any, **constants: Any) -> None:
        self.variants.add(f"{kernel.__name__} {tiles} {sorted((name, str(x)) for name, x in constants.items())}")


@pytest.mark.parametrize(("budget", "gluon"), [(0.0, False), (6000.0, False), (0.0, True)])
@pytest.mark.parametrize("objective", [Softmax(), Softmax(0.1, 40, 70), Sigmoid()])
def test_a_warm_up_launches_every_variant_that_a_block_does(
    objective: Softmax | Sigmoid, budget: float, gluon: bool
) -> None:
    """Of scores with whole tiles and others, kept rows and others."""
    backend.WARM.clear()
    seen = []
    n, m = (300, 400) if gluon else (40, 70)
    for warms in (True, False):
        machine = Launches(is_hopper=gluon)
        found = triton_backend(objective, "ieee", Tuning(gluon=gluon), machine, Kept(budget))
        block = block_of(n, m, 64, dtype=torch.float16 if gluon else torch.float32)
        if isinstance(objective, Sigmoid):
            block.rows.weight = block.cols.weight = None
        if warms:
            found.warm_up(replace(block, rows=block.rows[:1], cols=block.cols[:1]))
            assert found.kept.budget == budget and not found.kept.visits, "it takes nothing of the budget"
        elif isinstance(objective, Sigmoid):
            found.forward_backward(block)
        else:
            found.forward(block)
            found.backward(block)
        seen.append(machine.variants)
    assert seen[1] <= seen[0], f"compiled at the first hop: {seen[1] - seen[0]}"
    assert any("gluon_" in x for x in seen[1]) == gluon


@pytest.mark.slow
def test_the_launches_with_kept_exponentials_bind_and_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the rows, and all; whole tiles, and the columns past them."""
    monkeypatch.setattr(driver, "_active", NoDevice())
    machine, n, m = CompilesForHopper(), 700, 900
    for budget in (300 * 2 * 1024, 1e9):
        kept = Kept(budget)
        softmax = triton_backend(Softmax(), "ieee", Tuning(), machine, kept)
        block = block_of(n, m, 123, dtype=torch.bfloat16)
        softmax.forward(block)
        assert kept.visits[0].values.shape == (256 if budget < 1e6 else 768, 1024)
        softmax.backward(block)
    counts = {"lse_kernel": 6, "softmax_gradient_kernel": 1, "kept_gradient_kernel": 1}
    assert {name: len(machine.compiled[name]) for name in counts} == counts


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
    command += ["-o", "addopts=", "-m", "not slow or slow", "-k", "not rarer and not another"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
