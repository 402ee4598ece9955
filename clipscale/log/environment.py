"""Describes where a run runs: software versions, machine, command and commit."""

import os
import platform
import shutil
import subprocess
import sys
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict, cast

import torch

import clipscale
from clipscale.common.cpu import cores
from clipscale.config.secrets import without_secrets

PACKAGES = (
    "torch", "triton", "torchvision", "open_clip_torch", "timm", "numpy", "pillow", "hydra-core", "wandb",
)  # fmt: skip
# Beginnings of the environment variables that affect a run.
VARIABLES = ("NCCL_", "OMP_", "GOMP_", "CUDA_VISIBLE", "SLURM_JOB_ID")


class Environment(TypedDict):
    """env.json, without secrets."""

    time: str
    command: list[str]
    hostname: str
    platform: str
    python: str
    # Package -> its version.
    versions: dict[str, str]
    commit: str | None
    processes: int
    cpus: int
    # The name and the memory of each GPU.
    gpus: list[str]
    gpu_bytes: list[int]
    # The version that torch was built with.
    cuda: str | None
    variables: dict[str, str]


@cache
def installed() -> dict[str, str]:
    """Package -> its version. Each takes milliseconds to read."""
    return {name: version(name) for name in PACKAGES}


def environment(world_size: int = 1) -> Environment:
    """What this process runs on."""
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    record: Environment = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "hostname": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {"clipscale": clipscale.__version__} | installed(),
        "commit": _commit(),
        "processes": world_size,
        "cpus": cores(),
        "gpus": [gpu.name for gpu in gpus],
        "gpu_bytes": [gpu.total_memory for gpu in gpus],
        "cuda": torch.version.cuda,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }
    return cast(Environment, without_secrets(record))


def _commit() -> str | None:
    """The commit of this checkout, with `+` if tracked files differ from it; None for an installed package."""
    checkout = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    if not (checkout / ".git").exists() or not shutil.which("git"):
        return None
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
