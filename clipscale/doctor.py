"""`clipscale doctor` tries everything that training needs: devices, loss, processes, memory, decoding, folders.

Its ring of processes imports this module, so it imports no models, whose libraries load slowly.
"""

import io
import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from PIL import Image

from clipscale.common.hardware import cores
from clipscale.common.units import format_bytes
from clipscale.config.data import DataConfig
from clipscale.config.sections import LaunchConfig
from clipscale.config.tools import DoctorSettings, EvalRunConfig
from clipscale.data.loader.memory import free_memory
from clipscale.data.loader.offload import train_transform
from clipscale.data.order import CounterRNG
from clipscale.distributed import world as distributed
from clipscale.distributed.world import World
from clipscale.launch import local
from clipscale.loss.api import contrastive_loss
from clipscale.loss.reference import dense_contrastive_loss
from clipscale.report.environment import environment
from clipscale.report.table import TextTable, plain_console

PAIRS, WIDTH, SCALE = 96, 64, 20.0
"""Pairs of each process, feature width and logit scale of the loss that is tried."""
ALLOWED = 1e-4
"""Largest relative error of a float32 gradient that rounding explains."""
FILES, SIDE = 1024, 512
"""Open files that a loader process with many shard streams may need; pixels of the picture that is decoded."""
EXTRAS = {
    "s3fs": "s3:// addresses",
    "gcsfs": "gs:// addresses",
    "pyarrow": "Parquet tables",
    "transformers": "tokenizers of transformers (SigLIP's, multilingual ones)",
}
Finding = tuple[str, str]
"""A level and a message. The level is ok, note (it works, but deserves a look) or problem."""


def main(settings: DoctorSettings) -> int:
    """Print all findings; 1 if there is a problem."""
    console = plain_console()
    rows = []
    for check in CHECKS:
        with console.status(check.__name__):
            rows += [(level, check.__name__, message) for level, message in tried(check, settings)]
    console.print(TextTable(("", "", ""), [rows], left=("",)))
    return int(any(level == "problem" for level, *_ in rows))


def tried(check: Callable[[DoctorSettings], Iterator[Finding]], settings: DoctorSettings) -> Iterator[Finding]:
    """A check's findings. A check that fails is a problem."""
    try:
        yield from check(settings)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        yield "problem", f"{type(error).__name__}: {reason}"


# ---- checks ----


def software(settings: DoctorSettings) -> Iterator[Finding]:
    here = environment()
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items() if version)
    yield "ok", f"Python {here['python']}, {versions}"
    for package, use in EXTRAS.items():
        if find_spec(package) is None:
            yield "note", f"{package} is not installed: no {use}"


def devices(settings: DoctorSettings) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists()
        if not driver:
            yield "note", "no GPU: training runs on the CPU"
        elif torch.version.cuda is None:
            yield "problem", "there is a GPU driver, but this torch is built without CUDA"
        else:
            hidden = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r} hides it"
            there = f"there is a GPU driver, but torch (CUDA {torch.version.cuda}) finds no device"
            yield "problem", f"{there}: the driver may be too old for it, or {hidden}"
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        summary = f"GPU {number}: {gpu.name}, {format_bytes(free)} of {format_bytes(total)} free"
        if gpu.major < 8:
            yield "note", f"{summary}; no bf16 arithmetic: use precision=fp16"
        elif free < 0.9 * total:
            yield "note", f"{summary}; another process is using it"
        else:
            yield "ok", summary


def loss(settings: DoctorSettings) -> Iterator[Finding]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield judged(f"the gradient on {device.type}", loss_error(World(0, 1, device)))


def processes(settings: DoctorSettings) -> Iterator[Finding]:
    """Start one process for each GPU (two on a CPU), which compute one loss around a ring."""
    count = torch.cuda.device_count() or 2
    if count == 1:
        return
    started = time.monotonic()
    launch = LaunchConfig(procs=count, timeout_s=settings.timeout_s)
    ended = threading.Event()
    threading.Thread(target=_end_after, args=(settings.timeout_s, ended), daemon=True).start()
    try:
        error = local.start(EvalRunConfig(launch=launch), "clipscale.doctor:ring", count)["error"]
    except Exception:
        if time.monotonic() - started < settings.timeout_s:
            raise
        late = f"{count} processes did not compute a loss together in timeout_s={settings.timeout_s:g}"
        yield "problem", f"{late}; with NCCL_DEBUG=INFO they say what they wait for"
        return
    finally:
        ended.set()
    took = f"{count} processes on a ring, {time.monotonic() - started:.0f} s with their start; their gradient"
    yield judged(took, error)


def _end_after(seconds: float, ended: threading.Event) -> None:
    """Kill the processes of the ring, those that start late too, until the check has ended."""
    while not ended.wait(seconds):
        local.kill_children()
        seconds = 0.1


def memory(settings: DoctorSettings) -> Iterator[Finding]:
    total = psutil.virtual_memory().total
    yield "ok", f"{format_bytes(free_memory())} free for this process, of {format_bytes(total)}"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        more = f"data.shard_streams=64 may need more: ulimit -n {min(hard, 65536)}"
        yield "note", f"{soft} open files are allowed; {more}"


def decoding(settings: DoctorSettings) -> Iterator[Finding]:
    """Decode a noisy picture, which takes about as long as a photograph, for half a second on one core."""
    file = io.BytesIO()
    Image.effect_noise((SIDE, SIDE), 60).convert("RGB").save(file, "JPEG", quality=80)
    transform, out, count = train_transform(DataConfig(), 224), np.empty((3, 224, 224), np.uint8), 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    started = time.perf_counter()
    while (seconds := time.perf_counter() - started) < 0.5 or count < 10:
        transform(file.getvalue(), CounterRNG(count), out)
        count += 1
    torch.set_num_threads(threads)
    yield "ok", f"{count / seconds:.0f} pictures of {SIDE} pixels a second on one core; {cores()} cores"


def folders(settings: DoctorSettings) -> Iterator[Finding]:
    path = Path(settings.run).expanduser()
    there = next(folder for folder in (path, *path.resolve().parents) if folder.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        yield "problem", f"run={settings.run}: {there} cannot be written ({error.strerror})"
        return
    yield "ok", f"{path}: {format_bytes(shutil.disk_usage(there).free)} free"


CHECKS = (software, devices, loss, processes, memory, decoding, folders)


def judged(gradient: str, error: float) -> Finding:
    message = f"{gradient} differs from float64's by {error:.0e}"
    if error <= ALLOWED:  # false for NaN too
        return "ok", message
    return "problem", f"{message}: that is not rounding"


# ---- the loss against its definition ----


def loss_error(world: World) -> float:
    """Largest error of this process's part of the float32 gradient, relative to the largest entry of the dense float64 gradient."""
    generator = torch.Generator().manual_seed(0)
    u, v = (
        F.normalize(torch.randn(PAIRS * world.size, WIDTH, generator=generator, dtype=torch.float64), dim=-1)
        for _ in range(2)
    )
    reference = u.clone().requires_grad_(), v.clone().requires_grad_()
    dense_contrastive_loss(*reference, SCALE).backward()
    own = slice(PAIRS * world.rank, PAIRS * (world.rank + 1))
    features = tuple(x[own].float().to(world.device).requires_grad_() for x in (u, v))
    contrastive_loss(*features, torch.tensor(SCALE, device=world.device), fp32_precision="ieee").backward()
    worst = 0.0
    for ours, theirs in zip(features, reference):
        assert ours.grad is not None and theirs.grad is not None
        difference = (ours.grad.double().cpu() - theirs.grad[own]).abs().max() / theirs.grad.abs().max()
        worst = max(worst, difference.item()) if difference.isfinite() else float("inf")
    return worst


def ring(config: EvalRunConfig) -> dict[str, float]:
    """One of the processes that `processes` starts."""
    world = distributed.start("auto", timeout_s=config.launch.timeout_s)
    try:
        return {"error": max(world.gather(loss_error(world)))}
    finally:
        distributed.stop()
