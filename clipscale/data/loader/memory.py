"""Whether the memory of a rank's batches fits this machine."""

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import psutil

from clipscale.common.errors import UserError
from clipscale.common.units import format_bytes, whole_number
from clipscale.data.loader.host_batch import Layout
from clipscale.data.loader.shard_reader import OrderedShards
from clipscale.data.sample import limits
from clipscale.data.shards.access import Access
from clipscale.data.shards.store import Store

PEEK = 64
"""Samples of the first shard from which the size of encoded pictures is estimated."""
MARGIN = 0.9
"""Share of the free memory that the pictures may take."""
REMEDIES = {
    "host": "offload=encoded (the pictures' own bytes), offload=disk, data.buffers=1, a smaller batch or more machines",
    "encoded": "offload=disk, data.buffers=1, a smaller batch or more machines",
    "disk": "a smaller batch or more machines",
}
_GROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that are free on this machine and in this process's control group (container)."""
    free = int(psutil.virtual_memory().available)
    limit, stat = _GROUP / "memory.max", _GROUP / "memory.stat"
    if limit.is_file() and stat.is_file() and (number := whole_number(limit.read_text().strip())) is not None:
        used = dict(line.split() for line in stat.read_text().splitlines())
        free = min(free, number - int(used.get("anon", 0)) - int(used.get("shmem", 0)))
    return max(0, free)


def picture_bytes(source: OrderedShards, types: Sequence[str], layout: Layout, access: Access) -> float | None:
    """Mean bytes that are kept of a picture, estimated from the first samples; None if there is no picture."""

    with closing(source.first_samples(PEEK, limits(types), Store(access))) as raws:
        pictures = (data for raw in islice(raws, PEEK) for data in islice(raw.members.values(), 1))
        sizes = [min(len(data), layout.row_bytes) for data in pictures]
    return sum(sizes) / len(sizes) if sizes else None


def largest_pool(layout: Layout) -> int:
    """Bytes that a slot's pool never needs to exceed; 0 for backends without a pool."""
    return layout.samples * layout.row_bytes if layout.encoded else 0


def fitted(layout: Layout, expected: float | None = None, free: int | None = None) -> tuple[Layout, str]:
    """The layout with as large a pool for encoded pictures as fits, and a line that states the memory.

    `expected` is the mean size of an encoded picture (None: unknown). `free` is the `free_memory` before any process of this machine took
    its share (None: the memory free now). Raises UserError if the machine's processes cannot all have as much as they need.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    share = (free_memory() if free is None else free) / processes
    if layout.encoded:
        picture = layout.row_bytes if expected is None else expected
        most = largest_pool(layout)
        budget = MARGIN * share - replace(layout, pool=0).memory_bytes()
        # Pictures that are larger than their pixels can be stored as these.
        least = replace(layout, pool=most).memory_bytes(min(picture, layout.row_bytes))
        layout = replace(layout, pool=max(0, min(most, int(budget / layout.slots))))
        need = max(least, layout.memory_bytes(picture))
    else:
        least = need = layout.memory_bytes()
    each = f"{layout.slots} x {layout.samples} samples need {format_bytes(need)} of host memory in each process"
    if least > (MARGIN if layout.encoded else 1) * share:
        raise UserError(
            f"{layout.setting}: {each}, and {format_bytes(share)} are free for each of {processes}; take {REMEDIES[layout.backend]}"
        )
    message = f"batch memory: {layout.setting}, {each}, of {format_bytes(share)} free for each of {processes}"
    if layout.encoded and expected is not None:
        host = format_bytes(replace(layout, backend="host").memory_bytes())
        message += f" ({expected / 1000:.0f} kB a picture; offload=host: {host})"
    if layout.backend == "disk":
        message += f", and {format_bytes(layout.disk_bytes())} in {layout.folder}"
    return layout, message
