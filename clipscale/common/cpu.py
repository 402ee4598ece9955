"""The cores that a process or a rank may use, and whether they multiply bf16."""

import math
import os
import re
from contextlib import suppress
from pathlib import Path

from clipscale.common import ranks

# The CPU quota of the control group (container): microseconds or `max`, and the period.
CPU_SHARE = Path("/sys/fs/cgroup/cpu.max")
# Linux's description of the CPU.
CPU_INFO = Path("/proc/cpuinfo")


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


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies matrices of bf16 by instructions of its own. True where the system does not say."""
    with suppress(OSError):
        flags = re.search(r"^(?:flags|Features)\s*:(.*)", CPU_INFO.read_text(encoding="utf-8"), re.M)
        return flags is None or not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags[1].split())
    return True
