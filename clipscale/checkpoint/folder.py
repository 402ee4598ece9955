"""The checkpoints in the folder of a run, RUN/checkpoints/step_00001000, and which of them are kept."""

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.common.files import UNFINISHED_END
from clipscale.run_folder.chosen_checkpoint import Best
from clipscale.run_folder.names import EVAL, RUN_RECORDS, check_own, step_of

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


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run stay."""

    # Of the checkpoints that neither `every` nor `best` keeps, this many of the newest stay; 0: all.
    keep_newest: int = 2
    # Checkpoints at multiples of this many steps stay; 0: none.
    every: int = 0
    # The best checkpoint stays; None if there is no measure of the best.
    best: Best | None = None

    def outdated(self, checkpoints: list[Path], up_to: str) -> list[Path]:
        """Which of the `checkpoints`, sorted by step, to delete. Those after the one named `up_to` are left alone."""
        earlier = [path for path in checkpoints if step_of(path) <= step_of(Path(up_to))]
        best = self.best.among(map(step_of, earlier)) if self.best else None
        candidates = [path for path in earlier if step_of(path) != best]
        if self.every:
            candidates = [path for path in candidates if step_of(path) % self.every]
        return candidates[: -self.keep_newest]


def make_folder(run_dir: Path) -> None:
    """Make the run's folder. Raises UserError where it cannot be written, or is somebody else's."""
    try:
        check_own(run_dir)
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise UserError(f"run={run_dir} cannot be written ({error.strerror}); choose another run=PATH") from error


def remove_temporary(run_dir: Path) -> None:
    """Remove the unfinished files of a killed run. The caller holds the run's lock."""
    for folder in (run_dir, run_dir / "checkpoints", run_dir / EVAL):
        for path in folder.glob(f"*{TEMPORARY}"):
            if TEMPORARY_NAMES.fullmatch(path.name):
                discard(path)


def remove(checkpoint: Path) -> None:
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
