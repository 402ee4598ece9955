"""`clipscale doctor` tries what training needs: devices, memory, and the loss by a ring of processes.

These processes import this module, so it imports no models, whose libraries load slowly.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from clipscale.common.errors import first_line
from clipscale.common.terminal import doing
from clipscale.common.units import format_bytes
from clipscale.config.eval import EvalRunConfig
from clipscale.config.sections import LaunchConfig
from clipscale.data.loader.memory import free_memory
from clipscale.distributed.world import World, join, leave
from clipscale.launch import local
from clipscale.log.environment import environment
from clipscale.log.table import TextTable, show
from clipscale.loss.api import contrastive_loss
from clipscale.loss.reference import dense_contrastive_loss

PAIRS, WIDTH, SCALE = 96, 64, 20.0
"""Pairs of each process, feature width and logit scale of the loss that is tried."""
ALLOWED = 1e-4
"""Largest relative error of a float32 gradient that rounding explains."""
TIMEOUT_S = 120.0
"""For the processes to connect and to compute one loss together."""
Finding = tuple[str, str]
"""`ok`, `note` (it works, but deserves a look) or `problem`, and a message."""


def main(_: object = None) -> int:
    """Print all findings; 1 if there is a problem."""
    rows = []
    for check in CHECKS:
        doing(f"checking {check.__name__}")
        try:
            rows += [(level, check.__name__, message) for level, message in check()]
        except Exception as error:  # a check that fails is a problem, and the others go on
            rows.append(("problem", check.__name__, f"{type(error).__name__}: {first_line(error)}"))
    show(TextTable(("", "", ""), rows))
    return int(any(level == "problem" for level, *_ in rows))


def devices() -> Iterator[Finding]:
    versions = environment()["versions"]
    yield "ok", ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    driver = shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists()
    yield "ok", f"{format_bytes(free_memory())} of host memory are free for this process"
    if not torch.cuda.is_available() and driver:
        yield "problem", f"there is a GPU driver, but torch (CUDA {torch.version.cuda}) finds no device: is it too old?"
    elif not torch.cuda.is_available():
        yield "note", "no GPU: training runs on the CPU"
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        summary = f"GPU {number}: {gpu.name}, {format_bytes(free)} of {format_bytes(total)} free"
        if gpu.major < 8:
            yield "note", f"{summary}; no bf16 arithmetic: use precision=fp16"
        else:
            yield "ok", summary


def loss() -> Iterator[Finding]:
    """One process for each GPU (two on a CPU) compute one loss around a ring."""
    count = torch.cuda.device_count() or 2
    started = time.monotonic()
    config = EvalRunConfig(launch=LaunchConfig(procs=count, timeout_s=TIMEOUT_S))
    error = local.start(config, "clipscale.tools.doctor:ring", count)["error"]
    message = (
        f"{count} processes, {time.monotonic() - started:.0f} s with their start; their gradient differs from "
        f"float64's by {error:.0e}"
    )
    if error <= ALLOWED:  # false for NaN too
        yield "ok", message
    else:
        yield "problem", f"{message}: that is not rounding"


CHECKS = (devices, loss)


def ring(config: EvalRunConfig) -> dict[str, float]:
    """One of the processes that `loss` starts."""
    world = join("auto", timeout_s=config.launch.timeout_s)
    try:
        return {"error": max(world.gather(loss_error(world)))}
    finally:
        leave()


def loss_error(world: World) -> float:
    """Largest error of this rank's part of the float32 gradient, over the largest entry of the dense float64 one."""
    generator = torch.Generator().manual_seed(0)
    entries = torch.randn(2, PAIRS * world.size, WIDTH, generator=generator, dtype=torch.float64)
    whole = F.normalize(entries, dim=-1).requires_grad_()
    dense_contrastive_loss(whole[0], whole[1], SCALE).backward()
    rows = slice(PAIRS * world.rank, PAIRS * (world.rank + 1))
    features = whole.detach()[:, rows].float().to(world.device).requires_grad_()
    contrastive_loss(features[0], features[1], torch.tensor(SCALE, device=world.device)).backward()
    assert whole.grad is not None and features.grad is not None
    difference = (features.grad.double().cpu() - whole.grad[:, rows]).abs().max() / whole.grad.abs().max()
    return difference.item() if difference.isfinite() else float("inf")
