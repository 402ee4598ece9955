"""Makes the folder of a run, checks that its disk has room, and deletes what is unfinished or outdated in it."""

import re
import shutil
import tempfile
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.common.files import UNFINISHED_END, first_existing
from clipscale.common.units import format_bytes
from clipscale.run_folder.paths import EVAL, check_is_run_folder, checkpoints_of
from clipscale.run_folder.records import RUN_RECORDS

# Suffix of the names of files and folders that are being written or deleted.
TEMPORARY = ".tmp"
# Name of a record while it is being copied.
COPYING = f".copying{TEMPORARY}"
# Names of unfinished files that a killed run may leave.
TEMPORARY_NAMES = re.compile(
    rf"{re.escape(COPYING)}"
    rf"|\.(shared|{'|'.join(record.replaced for record in RUN_RECORDS if record.replaced)}){UNFINISHED_END}"
    r"|step_\d+(\.old)?\.tmp"
)


def make_folder(run_dir: Path) -> None:
    """Make the run's folder. Raises UserError where it cannot be written, or is somebody else's."""
    try:
        check_is_run_folder(run_dir)
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise UserError(f"run={run_dir} cannot be written ({error.strerror}); choose another run=PATH") from error


def check_room(run_dir: Path, size: int) -> None:
    """Raise UserError where the disk has no room for two checkpoints, of at least `size` bytes each.

    The newest stays while the next is written. A run that has a checkpoint already needs room for one more.
    """
    free = shutil.disk_usage(first_existing(run_dir)).free
    if free < (size if checkpoints_of(run_dir) else 2 * size):
        raise UserError(
            f"run={run_dir}: its disk has {format_bytes(free)} free; a checkpoint takes at least {format_bytes(size)}, "
            "and the first one needs room for two; make room, or choose another run=PATH"
        )


def remove_temporary(run_dir: Path) -> None:
    """Remove the unfinished files of a killed run. The caller holds the run's lock."""
    for folder in (run_dir, run_dir / "checkpoints", run_dir / EVAL):
        for path in folder.glob(f"*{TEMPORARY}"):
            if TEMPORARY_NAMES.fullmatch(path.name):
                discard(path)


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a half-deleted one is never taken for whole."""
    nameless = checkpoint.with_name(f"{checkpoint.name}.old{TEMPORARY}")
    discard(nameless)  # left by a deletion that was killed
    discard(checkpoint.replace(nameless))


def discard(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
