"""Measure the Triton kernels with several tile shapes on the device at hand, to fill in the table of triton_config.py:

    python -m clipscale.loss.triton.tune --rows 32768 --width 768 --dtype bfloat16

One line a kernel and tile shape, fastest first, in TFLOP/s and as a share of the same device's matmul rate for these operands. The table
is fixed rather than tuned at run time, so that two machines of a kind, and two runs, add in the same order.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import triton

from clipscale.loss.triton.panels import Problem
from clipscale.loss.triton.sigmoid import sigmoid_gradient_kernel, sigmoid_loss_kernel
from clipscale.loss.triton.softmax import lse_kernel, softmax_gradient_kernel
from clipscale.loss.triton.tuning import IEEE, TABLE, Tiles, tiles_for

KERNELS = ("lse", "softmax gradient", "sigmoid loss", "sigmoid gradient")


@dataclass
class Measurement:
    """One kernel with one tile shape."""

    kernel: str
    tiles: Tiles
    seconds: float  # infinity where it could not run
    remark: str = ""


def candidates(arithmetic: str) -> list[Tiles]:
    """Shapes worth trying: every entry of the table for this arithmetic, and variations of tile, warps, stages and registers."""
    if arithmetic == "ieee":
        return [IEEE, Tiles(128, 64, 32, 8, 3), Tiles(128, 128, 16, 8, 3)]
    known = [t for entries in TABLE.values() for (_, kind), t in entries.items() if kind == arithmetic]
    depths = (32, 64) if arithmetic == "half" else (16, 32)
    shapes = itertools.product(((128, 128), (128, 256), (256, 128)), depths, (4, 8), (3, 4), (None, 128))
    varied = [Tiles(*tile, depth, warps, stages, limit) for tile, depth, warps, stages, limit in shapes]
    return list(dict.fromkeys(known + varied))


def measure(
    problem: Problem,
    kernels: Iterable[str],
    shapes: Iterable[Tiles],
    clock: Callable[[Callable[[], object]], float],
    seconds: float = math.inf,
) -> list[Measurement]:
    """Time every kernel with every shape over the whole block as one panel, fastest first within a kernel.

    `clock` runs a function and returns its seconds. A shape that does not compile or fit is reported, not skipped, and so is what was
    not begun within `seconds`; shapes are tried in their order, for all kernels each.
    """
    found, end = [], time.monotonic() + seconds
    for tiles, kernel in itertools.product(shapes, kernels):
        if time.monotonic() > end:
            found.append(Measurement(kernel, tiles, float("inf"), "not run: no time was left"))
            continue
        run = _runner(kernel, replace(problem, tiles=tiles))
        try:
            found.append(Measurement(kernel, tiles, clock(run)))
        except RuntimeError as error:
            found.append(Measurement(kernel, tiles, float("inf"), str(error.__cause__ or error).splitlines()[0][:100]))
    return sorted(found, key=lambda m: (m.kernel, m.seconds))


def _runner(kernel: str, problem: Problem) -> Callable[[], None]:
    n, m, device = len(problem.u), len(problem.v), problem.u.device
    t = problem.tiles
    high, wide = triton.cdiv(n, t.rows), triton.cdiv(m, t.cols)
    (panel,) = problem.panels(n, m)
    scale, bias = problem.scale, torch.zeros_like(problem.scale)
    ends = (*panel.sizes, panel.positive)
    if kernel == "lse":
        parts = [torch.empty(size, device=device) for size in (wide * n, wide * n, high * m, high * m)]
        return lambda: problem.launch(
            lse_kernel, panel, panel.u, panel.v, problem.factor, None, None, *parts, *ends, ROWS=True, COLS=True
        )
    if kernel == "sigmoid loss":
        sums = torch.empty(high * wide, device=device)
        return lambda: problem.launch(
            sigmoid_loss_kernel, panel, panel.u, panel.v, scale, bias, None, None, sums, *ends
        )
    scores = torch.empty(high * t.rows, wide * t.cols, dtype=problem.dtype, device=device)
    last = (*panel.sizes, scores.stride(0), panel.positive)
    sums, products = (torch.empty(high * wide, device=device) for _ in range(2))
    if kernel == "sigmoid gradient":
        return lambda: problem.launch(
            sigmoid_gradient_kernel,
            panel,
            panel.u,
            panel.v,
            scale,
            bias,
            scale,
            None,
            None,
            scores,
            sums,
            products,
            *last,
            STORE=True,
        )
    lse, weight = torch.full((max(n, m),), 20.0, device=device), torch.full((max(n, m),), 1.0, device=device)
    sides = (lse, lse, weight, weight, weight, weight)
    return lambda: problem.launch(
        softmax_gradient_kernel, panel, panel.u, panel.v, problem.factor, scale, *sides, None, None, scores, products, *last, 1.0, 0.0, 0.0,
        ROWS=True, COLS=True, SMOOTH=False, STORE=True,
    )  # fmt: skip


def report(found: list[Measurement], flop: float, library: float, capability: int, arithmetic: str) -> str:
    """A line a measurement; * marks the table's present entry. `library` is the matmul's seconds."""
    lines = [f"matmul of the library: {flop / library / 1e12:.0f} TFLOP/s"]
    for m in found:
        kernel_pass = "backward" if "gradient" in m.kernel else "forward"
        mark = "*" if m.tiles == tiles_for(capability, kernel_pass, arithmetic) else " "
        speed = m.remark or f"{flop / m.seconds / 1e12:5.0f} TFLOP/s  {library / m.seconds:4.0%}"
        t = m.tiles
        shape = f"{t.rows}x{t.cols}x{t.depth} warps {t.warps} stages {t.stages} registers {t.registers or '-'}"
        lines.append(f"{mark} {m.kernel:17s} {shape:45s} {speed}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32768, help="of images and of texts")
    parser.add_argument("--width", type=int, default=768, help="of the features, a multiple of 64")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--fp32-precision", choices=("ieee", "tf32"), default="tf32")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--seconds", type=float, default=math.inf, help="nothing is begun after so many")
    options = parser.parse_args()
    if not torch.cuda.is_available() or options.width % 64:
        parser.error("this needs a CUDA device and a width that is a multiple of 64")
    u, v = (
        torch.nn.functional.normalize(torch.randn(options.rows, options.width, device="cuda"), dim=1) for _ in range(2)
    )
    u, v = (x.to(getattr(torch, options.dtype)) for x in (u, v))
    problem = Problem.of(
        u, v, torch.tensor(20.0, device="cuda"), 0, (None, None), options.fp32_precision, backward=False
    )

    def clock(run: Callable[[], object]) -> float:
        return float(triton.testing.do_bench(run, return_mode="median")) / 1e3

    torch.backends.cuda.matmul.fp32_precision = options.fp32_precision
    library = clock(lambda: torch.mm(u, v.T))
    major, minor = torch.cuda.get_device_capability()
    found = measure(problem, options.kernels, candidates(problem.arithmetic), clock, options.seconds)
    print(torch.cuda.get_device_name())
    print(report(found, 2.0 * options.rows**2 * options.width, library, 10 * major + minor, problem.arithmetic))


if __name__ == "__main__":
    main()
