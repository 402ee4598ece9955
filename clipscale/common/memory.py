"""The free memory of this machine and of this process's control groups, and what happens to memory that is freed."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
# Lines `number:controllers:path`; without controllers in version 2 of control groups.
OWN_GROUPS = Path("/proc/self/cgroup")
# File of the limit, in versions 2 and 1 of control groups -> the fields of `memory.stat` that count as used. The page
# cache does not count.
LIMITS = {"memory.max": ("anon", "shmem"), "memory.limit_in_bytes": ("total_rss", "total_shmem")}
# Options of glibc's mallopt(3): the free memory at the heap's end that is given back, and the blocks outside the heap.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def free_memory() -> int:
    """Bytes that are free on this machine and in this process's control groups (container, Slurm job, service)."""
    free = int(psutil.virtual_memory().available)
    for folder in control_groups():
        for name, fields in LIMITS.items():
            file = folder / name
            limit = file.read_text().strip() if file.is_file() else "max"
            if limit != "max":
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = sum(int(stat.get(field, 0)) for field in fields)
                free = min(free, int(limit) - used)
    return max(0, free)


def control_groups() -> Iterator[Path]:
    """The folders of this process's memory groups and of their parents. In a container some do not exist."""
    for line in OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") or not controllers:
            folder = GROUPS / controllers / path.lstrip("/")
            yield folder
            yield from folder.parents


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory for the next allocation of this process.

    By default malloc returns large blocks to the system. The system zeroes each page again when the next step allocates
    the same activations: up to a fifth of a step's time on a CPU. The process may hold a third more memory, as its heap
    has gaps. Changes nothing with another C library, or where an environment variable MALLOC_* configures malloc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
