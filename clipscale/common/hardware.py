"""The table of GPUs, with memory and FLOP/s, for MFU and `clipscale plan`; and the cores of this machine."""

import math
import os
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clipscale.common import files, ranks
from clipscale.common.errors import UserError
from clipscale.common.text import did_you_mean

# The CPU quota of the control group (container): microseconds or `max`, and the period.
CPU_SHARE = Path("/sys/fs/cgroup/cpu.max")
# Linux's description of the CPU.
CPU_INFO = Path("/proc/cpuinfo")
# The most pictures or captions of a pass on a GPU: with more, attention kernels exceed the largest grid.
MAX_SEQUENCES = 2**15


def prepare_torch() -> None:
    """Set variables that torch reads when it is loaded, unless they are set.

    OpenMP's idle threads sleep: threads that spin keep the cores that data workers and other ranks need. The segments
    of a GPU's allocator grow: chunks of many widths leave gaps in segments of fixed sizes.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if not any(name.startswith(("OMP_", "GOMP_", "KMP_")) for name in os.environ):
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ["GOMP_SPINCOUNT"] = "0"


def cores(process: int = 0) -> int:
    """Cores that a process (0: this one) may use: at most its affinity, and at most this control group's quota."""
    count = len(os.sched_getaffinity(process))
    quota, period = CPU_SHARE.read_text().split() if CPU_SHARE.is_file() else ("max", "1")
    return count if quota == "max" else max(1, min(count, math.ceil(int(quota) / int(period))))


def cores_of_rank() -> int:
    """Cores that one rank may use.

    Slurm gives each task its own cores. Otherwise the ranks of a machine share the launcher's cores. A rank that is
    bound to the cores near its GPU uses at most these.
    """
    local_ranks = ranks.local_world_size()
    if "SLURM_PROCID" in os.environ and cores() * local_ranks <= (os.cpu_count() or 1):
        return cores()
    return min(cores(), max(1, cores(os.getppid()) // local_ranks))


@dataclass(frozen=True)
class Hardware:
    """A GPU model, in the words and units of hardware.yaml."""

    words: list[str]
    capability: int
    memory: float
    half: float
    tf32: float

    @property
    def memory_bytes(self) -> int:
        return int(self.memory * 2**30)

    def peak(self, precision: str) -> float:
        """Peak FLOP/s of matrix products in `fp32` (by TF32), `bf16` or `fp16`."""
        return 1e12 * (self.tf32 if precision == "fp32" else self.half)


# Name that `hardware=` accepts -> the GPU.
HARDWARE = {
    name: Hardware(**values) for name, values in files.read_yaml(Path(__file__).with_name("hardware.yaml")).items()
}


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies matrices of bf16 by instructions of its own. True where the system does not say."""
    with suppress(OSError):
        flags = re.search(r"^(?:flags|Features)\s*:(.*)", CPU_INFO.read_text(encoding="utf-8"), re.M)
        return flags is None or not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags[1].split())
    return True


def gpu_here() -> str | None:
    """The driver's name of this machine's first GPU; None without one.

    Asks the driver, not CUDA: a launcher that initialises CUDA keeps memory on the GPU.
    """
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return names[0] if names and os.environ.get("CUDA_VISIBLE_DEVICES") != "" else None


def hardware(name: str) -> Hardware:
    """The entry of that name. A chip's name such as `h100` suffices if the table has one memory size of that chip.

    Raises UserError with the nearest names.
    """
    word = name.lower()
    alike = [listed for listed in HARDWARE if listed.startswith(f"{word}-")]
    if word not in HARDWARE and len(alike) != 1:
        raise UserError(f"hardware={name}: unknown{did_you_mean(word, HARDWARE)}; there is {', '.join(HARDWARE)}")
    return HARDWARE.get(word) or HARDWARE[alike[0]]


def hardware_of(device_name: str) -> str | None:
    """The table's name of a GPU by the driver's `device_name` ("NVIDIA A100-SXM4-80GB"); None if the table lacks it.

    If `device_name` does not contain the memory, this is the first entry with that chip.
    """
    words = set(re.split(r"[\s-]+", device_name))
    same_chip = [
        name for name, entry in HARDWARE.items() if all(word in words or word.endswith("GB") for word in entry.words)
    ]
    return max(same_chip, key=lambda name: len(words.intersection(HARDWARE[name].words)), default=None)
