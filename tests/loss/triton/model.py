"""A static model of the Triton kernels' speed: instructions of the compiled code, by the unit that runs them, and clocks.

    clocks of a unit = instructions (or bytes) of one tile on one multiprocessor / what the unit does in a clock
    share of the GEMM rate = clocks of the tensor cores / clocks of the slowest unit

If two programs share a multiprocessor, one's epilogue overlaps the other's matmul, and the slowest unit alone counts. One program alone
takes the slowest unit of its matmul, then that of the rest. Latencies, waves of programs, clocks that fall under load and bank conflicts
are left out: the model ranks choices, and is an upper bound of speed.

`python -m tests.loss.triton.model` prints the table of docs/loss.md and writes model.json; `... half` compares every candidate.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton

from clipscale.loss.triton.panels import shared_slots
from clipscale.loss.triton.tuning import GLUON, GLUON_ROWS
from tests.loss.triton.binaries import GLUONS, REGISTERS, Binary, compiled_entry, entry, gluon_entry, stores

RECORD = Path(__file__).with_name("model.json")
WIDTHS = (512, 768, 1024)
MATRIX = re.compile(r"HGMMA|HMMA|UTC\w*MMA")


@dataclass(frozen=True)
class Architecture:
    """What a multiprocessor does in a clock (CUDA C++ programming guide, arithmetic instructions; data sheets of A100, H200, B200)."""

    flop: int  # of bf16 on the tensor cores
    float32: int  # operations; half of what there is where a warp takes two clocks
    exponentials: int = 16
    shuffles: int = 32
    shared_bytes: int = 128
    l2_bytes: int = 36  # from L2: between 32 and 39 measured on A100 and H100 (arXiv 2402.13499)
    memory_bytes: int = (
        20  # to memory: 4.8 TB/s over 132 multiprocessors at 1.8 GHz; 2.0 over 108 at 1.4; 8 over 148 at 1.9
    )
    shared_memory: int = 227 << 10


ARCHITECTURES = {
    80: Architecture(flop=2048, float32=64, memory_bytes=13, shared_memory=163 << 10),
    90: Architecture(flop=4096, float32=128),
    100: Architecture(flop=8192, float32=128, memory_bytes=28),
}
FLOAT32 = {"FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2", "FMNMX", "FSEL", "FSETP"}


@dataclass(frozen=True)
class Code:
    """Instructions of a warp: of one step of the loop over D, and of the rest of a tile."""

    step: Counter[str]
    prologue: Counter[str]
    epilogue: Counter[str]

    @property
    def tile(self) -> Counter[str]:
        return self.prologue + self.epilogue


def loops_of(cubin: bytes) -> tuple[list[str], list[tuple[int, int]]]:
    """The instructions, and the first and last of each loop, the smallest loop first."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in lines:
        if found := re.match(r"(\.L_\w+):", line):
            labels[found[1]] = len(names)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z]\w*)(.*)", line):
            if target := re.search(r"\((\.L_\w+)\)", found[2]):
                branches.append((len(names), target[1]))
            names.append(found[1])
    spans = sorted(((labels[to], at) for at, to in branches if labels.get(to, at + 1) <= at), key=lambda x: x[1] - x[0])
    return names, spans


def code_of(cubin: bytes, walks: bool) -> Code:
    """The code by its loops: the smallest with a matrix instruction is that over D; with `walks` the next larger is that over tiles."""
    names, spans = loops_of(cubin)
    loops = [x for x in spans if any(MATRIX.match(name) for name in names[x[0] : x[1] + 1])]
    start, stop = loops[0]
    step = Counter(names[start : stop + 1])
    first, last = next(x for x in loops if x[0] < start and x[1] > stop) if walks else (0, len(names) - 1)
    return Code(step, Counter(names[first:start]), Counter(names[stop + 1 : last + 1]))


def gluon_code(cubin: bytes) -> Code:
    """Of a warp-specialised kernel: of a multiplying warp's step, and of the rest of a computing warp's tile."""
    names, spans = loops_of(cubin)

    def smallest(pattern: str) -> tuple[int, int]:
        return next(x for x in spans if any(re.match(pattern, name) for name in names[x[0] : x[1] + 1]))

    (start, stop), (first, last) = smallest(MATRIX.pattern), smallest("MUFU")
    rest = Counter(names[first : last + 1])
    if first <= start and stop <= last:
        rest -= Counter(names[start : stop + 1])
    return Code(Counter(names[start : stop + 1]), Counter(), rest)


def clocks(binary: Binary, capability: int, width: int, name: str) -> dict[str, float]:
    """Clocks of one tile on one multiprocessor, by unit; "bound" is what they come to together.

    In a warp-specialised kernel the work of all consumers and of the loading warp overlaps, and the columns' steps that stay in shared
    memory are loaded once a strip, which is left out.
    """
    a, t, is_gluon = ARCHITECTURES[capability], binary.tiles, name in GLUONS
    steps, stored = width // t.depth, 2 * t.rows * t.cols * stores(name)
    if is_gluon:
        code, resident = gluon_code(binary.cubin), shared_slots(t, steps, stores(name))["RESIDENT"]
        warps = 4 * t.rows // GLUON_ROWS  # that compute
        multiplying = {90: warps, 100: 1}[capability]
    else:
        code, resident, warps, multiplying = code_of(binary.cubin, name.startswith("lse")), 0, t.warps, t.warps

    def of(names: set[str], a_clock: float) -> float:
        return sum(n for name, n in code.tile.items() if name in names) * warps * 32 / a_clock

    loaded = t.rows * width + t.cols * t.depth * (steps - resident)  # numbers
    # Hopper's product reads both operands from shared memory, 64 rows at a time; each is written there once
    shared = loaded + width * (t.rows // 64) * (64 + t.cols) + stored * is_gluon
    matmul = {
        "tensor cores": 2 * t.rows * t.cols * width / a.flop,
        "L2": 2 * loaded / a.l2_bytes,
        "shared memory": 2 * shared / a.shared_bytes,
        "issue": code.step.total() * steps * multiplying * 32 / 128,
    }
    rest = {
        "issue": code.tile.total() * warps * 32 / 128,
        "float32": of(FLOAT32, a.float32),
        "exponentials": of({"MUFU"}, a.exponentials),
        "shuffles": of({"SHFL"}, a.shuffles),
        "memory": stored / a.memory_bytes,
    }
    found = matmul | rest | {"issue": matmul["issue"] + rest["issue"]}
    programs = min(REGISTERS // (32 * t.warps * binary.registers), a.shared_memory // (binary.shared + 1024))
    overlaps = is_gluon or programs >= 2
    return found | {"bound": max(found.values()) if overlaps else max(matmul.values()) + max(rest.values())}


def share(binary: Binary, capability: int, width: int, name: str) -> float:
    """The predicted share of the GEMM rate."""
    found = clocks(binary, capability, width, name)
    return found["tensor cores"] / found["bound"]


PLAIN = ("lse", "softmax gradient", "sigmoid gradient", "lse, keys", "softmax gradient, keys")
GLUON_MODELLED = ("lse, gluon", "softmax gradient, gluon", "sigmoid gradient, gluon")
MODELLED = [(c, name) for c in ARCHITECTURES for name in (*PLAIN, *(GLUON_MODELLED if c in GLUON else ()))]


def binary_of(capability: int, name: str) -> Binary:
    return (gluon_entry if name in GLUONS else entry)(capability, "bf16", name)


def shares(capability: int, name: str) -> list[float]:
    return [round(share(binary_of(capability, name), capability, width, name), 3) for width in WIDTHS]


def main() -> None:
    record = {f"sm_{c} {name}": shares(c, name) for c, name in MODELLED}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(
        "| kernel | architecture | tiles | instructions a step / the rest | slowest unit | 512 | 768 | 1,024 |\n"
        + "|---" * 8
        + "|"
    )
    for c, name in MODELLED:
        binary = binary_of(c, name)
        found = clocks(binary, c, 768, name)
        code = gluon_code(binary.cubin) if name in GLUONS else code_of(binary.cubin, name.startswith("lse"))
        slowest = max((x for x in found if x != "bound"), key=lambda x: found[x])
        alone = "" if found["bound"] == found[slowest] else ", then the rest"
        percents = " | ".join(f"{100 * x:.0f} %" for x in record[f"sm_{c} {name}"])
        print(
            f"| {name} | sm_{c} | {binary.tiles} | {code.step.total()} / {code.tile.total()} | {slowest}{alone} | {percents} |"
        )
    if sys.argv[1:]:
        from clipscale.loss.triton.tuning import candidates

        for c in ARCHITECTURES:
            for name in PLAIN[:2]:
                for tiles in candidates(sys.argv[1]):
                    binary = compiled_entry(name, c, "bf16", tiles)
                    if not binary.stack and binary.shared <= ARCHITECTURES[c].shared_memory:
                        print(f"{share(binary, c, 768, name):.3f} sm_{c} {name} {tiles}", flush=True)


if __name__ == "__main__":
    main()
