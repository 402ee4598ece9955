"""Whether the memory of a rank's batches fits this machine."""

import os
from contextlib import closing
from itertools import islice
from pathlib import Path

import psutil

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
_GROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that are free on this machine and in this process's control group (container)."""
    free = int(psutil.virtual_memory().available)
    limit, stat = _GROUP / "memory.max", _GROUP / "memory.stat"
    if limit.is_file() and stat.is_file() and (most := limit.read_text().strip()) != "max":
        used = dict(line.split() for line in stat.read_text().splitlines())
        free = min(free, int(most) - int(used.get("anon", 0)) - int(used.get("shmem", 0)))
    return max(0, free)


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
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    share, need = (free_memory() if free is None else free) / processes, layout.memory_bytes(picture)
    setting = f"offload={layout.backend}"
    each = f"{layout.slots} x {layout.samples} samples need {format_bytes(need)} of host memory in each process"
    if need > share:
        raise UserError(
            f"{setting}: {each}, and {format_bytes(share)} are free for each of {processes}; take "
            f"{REMEDIES[layout.backend]}"
        )
    message = f"batch memory: {setting}, {each}, of {format_bytes(share)} free for each of {processes}"
    if picture is not None:
        message += f" ({picture / 1000:.0f} kB a picture)"
    return message
