"""The table of GPUs, with memory, FLOP/s and links, for MFU and `clipscale plan`; and the cores of this machine."""

import math
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.common.units import nearest

GIB = 2**30
CPU_SHARE = Path("/sys/fs/cgroup/cpu.max")
"""The CPU quota of the control group (container): microseconds or `max`, and the period."""


def let_threads_sleep() -> None:
    """Let OpenMP's idle threads sleep, unless its variables are set. Takes effect before torch is loaded.

    Threads that spin keep the cores that data workers and other ranks need.
    """
    if not any(name.startswith(("OMP_", "GOMP_", "KMP_")) for name in os.environ):
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ["GOMP_SPINCOUNT"] = "0"


def cores() -> int:
    """Cores that this process may use, by its affinity and the quota of its control group."""
    count = len(os.sched_getaffinity(0))
    quota, period = CPU_SHARE.read_text().split() if CPU_SHARE.is_file() else ("max", "1")
    return count if quota == "max" else max(1, min(count, math.ceil(int(quota) / int(period))))


def cores_of_rank() -> int:
    """Cores that one rank may use. Slurm gives each task its own; otherwise the ranks of a machine share them."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    bound = "SLURM_PROCID" in os.environ and cores() * ranks <= (os.cpu_count() or 1)
    return cores() if bound else max(1, cores() // ranks)


@dataclass(frozen=True)
class Hardware:
    """A GPU model. Rates are from the data sheets: dense, without sparsity."""

    words: tuple[str, ...]
    """Words in the driver's name of the device; the first names the chip."""
    capability: int
    """Compute capability: 90 for 9.0."""
    memory: float
    """Total GiB that the driver reports, rounded down to a half."""
    half: float
    """Peak TFLOP/s of matrix products in bf16 (Volta: fp16)."""
    tf32: float
    """The same in TF32, or in float32 on GPUs without TF32."""
    link: float
    """GB/s that a GPU can send to others in the node: NVLink, else PCIe."""

    @property
    def memory_bytes(self) -> int:
        return int(self.memory * GIB)

    def peak(self, precision: str) -> float:
        """Peak FLOP/s of matrix products in `fp32` (by TF32), `bf16` or `fp16`."""
        return 1e12 * (self.tf32 if precision == "fp32" else self.half)


HARDWARE = {
    "a100-80g": Hardware(("A100", "80GB"), 80, 79.0, 312, 156, 300),
    "a100-40g": Hardware(("A100", "40GB"), 80, 39.0, 312, 156, 300),
    "a800-80g": Hardware(("A800", "80GB"), 80, 79.0, 312, 156, 200),
    "h100-80g": Hardware(("H100",), 90, 79.0, 989, 494, 450),
    "h800-80g": Hardware(("H800",), 90, 79.0, 989, 494, 200),
    "h200-141g": Hardware(("H200",), 90, 139.5, 989, 494, 450),
    "b200-180g": Hardware(("B200",), 100, 178.0, 2250, 1100, 900),
    "l40s-48g": Hardware(("L40S",), 89, 44.0, 362, 183, 32),
    "rtx4090-24g": Hardware(("4090",), 89, 23.5, 165, 82.6, 32),
    "v100-32g": Hardware(("V100", "32GB"), 70, 31.5, 125, 15.7, 150),
    "v100-16g": Hardware(("V100", "16GB"), 70, 15.5, 125, 15.7, 150),
}
"""By the name that `hardware=` accepts. The H100 is the SXM board."""


def gpu_here() -> str | None:
    """The driver's name of this machine's first GPU, if any. A launcher that asked CUDA would keep memory on it."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return names[0] if names and os.environ.get("CUDA_VISIBLE_DEVICES") != "" else None


def hardware(name: str) -> Hardware:
    """The entry of that name. Raises UserError with the nearest names if there is none."""
    if name.lower() not in HARDWARE:
        raise UserError(f"hardware={name}: unknown{nearest(name.lower(), HARDWARE)}; there is {', '.join(HARDWARE)}")
    return HARDWARE[name.lower()]


def hardware_of(device_name: str) -> str | None:
    """The table's name of what the driver calls `device_name` ("NVIDIA A100-SXM4-80GB"); None if the table lacks it.

    If the driver's name does not contain the memory, the first entry with that chip.
    """
    words = set(re.split(r"[\s-]+", device_name))
    same = [name for name, entry in HARDWARE.items() if set(entry.words) <= words]
    same_chip = [name for name, entry in HARDWARE.items() if entry.words[0] in words]
    return next(iter(same + same_chip), None)
