"""Checks that the memory of a rank's batches fits this machine."""

from clipscale.common import ranks
from clipscale.common.errors import UserError
from clipscale.common.memory import free_memory
from clipscale.common.units import format_bytes
from clipscale.data.loader.host_batch import Layout


def check_memory(layout: Layout, free: int | None) -> str:
    """Check the batch memory. Returns a line that states it. Raises UserError if the machine has too little for all its
    processes.

    `free`: `free_memory` before any process of this machine allocated its batches; None to ask now.
    """
    if free is None:
        free = free_memory()
    processes = ranks.local_world_size()
    share = free / processes
    need = layout.memory_bytes()
    batches = f"{layout.slots} x {layout.samples} samples"
    if need > share:
        fewer_buffers = "data.buffers=1, " if layout.slots > 1 else ""
        raise UserError(
            f"data.buffers={layout.slots}: {batches} need {format_bytes(need)} of host memory in each process, and "
            f"{format_bytes(share)} are free for each of {processes}; take "
            f"{fewer_buffers}a smaller batch or more machines"
        )
    return f"batch memory: {batches}, {format_bytes(need)} of {format_bytes(share)} free in each process"
