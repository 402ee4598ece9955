"""`clipscale doctor` shows what training needs on this machine: versions, memory and devices."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from clipscale.common.memory import free_memory
from clipscale.common.units import format_bytes
from clipscale.log.environment import environment
from clipscale.log.table import TextTable, show


def main(_: object = None) -> int:
    """Print all findings. Returns 1 if there is a problem."""
    rows = list(findings())
    show(TextTable(("", ""), rows))
    return int(any(level == "problem" for level, _ in rows))


def findings() -> Iterator[tuple[str, str]]:
    """Yield findings: `ok`, `note` (it works, but deserves a look) or `problem`, with a message."""
    versions = environment()["versions"]
    yield "ok", ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    yield "ok", f"{format_bytes(free_memory())} of host memory are free for this process"
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists():
            yield "problem", f"there is a GPU driver, but torch (CUDA {torch.version.cuda}) finds no device: too old?"
        else:
            yield "note", "no GPU: training runs on the CPU"
    for number in range(torch.cuda.device_count()):
        try:
            gpu = torch.cuda.get_device_properties(number)
            free, total = torch.cuda.mem_get_info(number)
        except RuntimeError as error:  # raised for a GPU in exclusive mode that another process has taken
            first_line = str(error).partition("\n")[0]
            yield "problem", f"GPU {number} cannot be used: {first_line}"
            continue
        summary = f"GPU {number}: {gpu.name}, {format_bytes(free)} of {format_bytes(total)} free"
        if gpu.major < 8:
            yield "note", f"{summary}; no bf16 arithmetic: use precision=fp16"
        else:
            yield "ok", summary
