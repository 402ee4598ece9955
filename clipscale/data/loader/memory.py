"""Whether the memory of a rank's batches fits this machine."""

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import psutil

from clipscale.common import ranks
from clipscale.common.errors import UserError
from clipscale.common.units import format_bytes
from clipscale.data.loader.host_batch import Layout
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store

PEEK = 64
"""Samples whose extent is looked at."""
REMEDIES = {
    "host": "offload=encoded (the pictures' own bytes), data.buffers=1, a smaller batch or more machines",
    "encoded": "data.buffers=1, a smaller batch or more machines",
}
GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
"""Lines `number:controllers:path`; without controllers in version 2 of control groups."""
LIMITS = {"memory.max": ("anon", "shmem"), "memory.limit_in_bytes": ("total_rss", "total_shmem")}
"""The files of limits in versions 2 and 1, and what counts as used in `memory.stat`. The page cache makes way."""


def free_memory() -> int:
    """Bytes that are free on this machine and in this process's control groups (container, Slurm job, service)."""
    free = int(psutil.virtual_memory().available)
    for folder in control_groups():
        for name, kinds in LIMITS.items():
            limit = folder / name
            if limit.is_file() and (most := limit.read_text().strip()) != "max":
                used = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                free = min(free, int(most) - sum(int(used.get(kind, 0)) for kind in kinds))
    return max(0, free)


def control_groups() -> Iterator[Path]:
    """The folders of this process's memory groups, each with those around it. Some do not exist in a container."""
    for line in OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") or not controllers:
            folder = GROUPS / controllers / path.lstrip("/")
            yield folder
            yield from folder.parents


def picture_bytes(url: str, layout: Layout, store: Store) -> float | None:
    """Mean bytes stored of a picture, at most, by the extents of a shard's first samples; None if it has none."""
    with closing(read_shard(url, ReadProblem(), lambda _: False, store=store)) as raws:
        sizes = [min(raw.extent, layout.row_bytes) for raw in islice(raws, PEEK)]
    return sum(sizes) / len(sizes) if sizes else None


def stated_memory(layout: Layout, picture: float | None, free: int | None = None) -> str:
    """A line that states the memory. Raises UserError if the machine's processes cannot all have as much.

    `picture` is the mean size of an encoded picture (None: unknown). `free` is the `free_memory` before any process of
    this machine took its share (None: the memory free now).
    """
    processes = ranks.of_machine()
    share, need = (free_memory() if free is None else free) / processes, layout.memory_bytes(picture)
    setting = f"offload={layout.backend}"
    each = f"{layout.slots} x {layout.samples} samples need {format_bytes(need)} of host memory in each process"
    if need > share:
        raise UserError(
            f"{setting}: {each}, and {format_bytes(share)} are free for each of {processes}; take "
            f"{REMEDIES[layout.backend]}"
        )
    memory = f"{format_bytes(need)} of {format_bytes(share)} free in each process, {setting}"
    message = f"batch memory: {layout.slots} x {layout.samples} samples, {memory}"
    if picture is not None:
        message += f" ({picture / 1000:.0f} kB a picture)"
    return message
