"""Checks that the disk has room for a run's checkpoints."""

import shutil
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.common.files import first_existing
from clipscale.common.units import format_bytes
from clipscale.run_folder.names import checkpoints_of


def check_room(run_dir: Path, size: int) -> None:
    """Raise UserError where the disk has no room for two checkpoints of `size` bytes: the newest stays while the next
    is written. For a run that has a checkpoint already, room for one is enough."""
    free = shutil.disk_usage(first_existing(run_dir)).free
    if free < (size if checkpoints_of(run_dir) else 2 * size):
        raise UserError(
            f"run={run_dir}: its disk has {format_bytes(free)} free; a checkpoint takes {format_bytes(size)}, and the "
            "first one needs room for two; make room, or choose another run=PATH"
        )
