"""The folder of a run: its records, its checkpoints RUN/checkpoints/step_00001000, and which of them are kept."""

import logging
import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clipscale.common import files
from clipscale.common.checkpoints import RESULT, Best, check_own, checkpoints_of, step_of
from clipscale.common.errors import UserError
from clipscale.common.units import unused
from clipscale.own_machine.records import read_or_set_aside

log = logging.getLogger(__name__)

# Suffix of the names of files and folders that are being written or deleted.
TEMPORARY = ".tmp"
# A record that is being copied.
COPYING = f".copying{TEMPORARY}"
# Names of unfinished files that a killed run may leave.
TEMPORARY_NAMES = re.compile(
    rf"{re.escape(COPYING)}"
    r"|\.shared-[0-9a-f]{16}\.tmp"
    r"|\.(config\.yaml|env\.json|metrics\.jsonl|result\.json|step_\d+\.json|final\.json)-[0-9a-f]{16}\.tmp"
    r"|step_\d+(\.old)?\.tmp"
)
# Files and folders of a run beside its checkpoints. The first three hold its measurements.
RUN_RECORDS = (
    "metrics.jsonl", "eval", "result.json", "config.yaml", "env.json", "report.html", "tensorboard", "wandb"
)  # fmt: skip


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run stay."""

    # The newest so many; 0: all.
    newest: int = 2
    # Those at multiples of this many steps; 0: none.
    every: int = 0
    # The best one; None: it goes as all others do.
    best: Best | None = None

    def outdated(self, checkpoints: list[Path], last: str) -> list[Path]:
        """The checkpoints to delete, of those given by step, up to the one named `last`."""
        earlier = [path for path in checkpoints if path.name <= last]
        best = self.best.among(map(step_of, earlier)) if self.best else None
        others = [path for path in earlier if step_of(path) != best]
        return [path for path in others if not self.every or step_of(path) % self.every][: -self.newest]


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
    """Remove what a killed run has left unfinished. The caller holds the run's lock."""
    for folder in (run_dir, run_dir / "checkpoints", run_dir / "eval"):
        for path in folder.glob(f"*{TEMPORARY}"):
            if TEMPORARY_NAMES.fullmatch(path.name):
                discard(path)


def set_records_aside(run_dir: Path, why: str = "begins anew, without a checkpoint") -> None:
    """Move the records of an earlier run, whose checkpoints are gone, into a folder of their own, and say `why`."""
    records = [run_dir / name for name in RUN_RECORDS if (run_dir / name).exists()]
    if any(path.name in RUN_RECORDS[:3] and path.stat().st_size for path in records):
        aside = unused(run_dir / "earlier")
        aside.mkdir()
        for path in records:
            path.rename(aside / path.name)
        log.warning("run=%s %s; its earlier records are now in %s", run_dir, why, aside)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint. It loses its name first, so that a half-deleted one is never taken for whole."""
    nameless = checkpoint.with_name(f"{checkpoint.name}.old{TEMPORARY}")
    discard(nameless)  # of a deletion that was killed
    discard(checkpoint.replace(nameless))


def discard(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def set_outdated_aside(run_dir: Path, step: int, *, begins_elsewhere: bool) -> None:
    """Before a run goes on after `step`: set aside what its folder has of another run or of later steps.

    `begins_elsewhere`: it begins anew, or from a checkpoint of another folder.
    """
    if begins_elsewhere:
        set_records_aside(run_dir)
    read_or_set_aside(run_dir / RESULT, files.read_record)
    (run_dir / RESULT).unlink(missing_ok=True)
    if step:
        set_later_aside(run_dir, step)


def set_later_aside(run_dir: Path, step: int) -> None:
    """Rename the checkpoints after `step`, from which a run continues, so that none of them is taken for the newest.
    The curve so far, and the results after `step`, go to a folder of their own."""
    later = [path for path in checkpoints_of(run_dir) if step_of(path) > step]
    renamed = [set_aside(path, "aside") for path in later]
    if later:
        aside = unused(run_dir / "earlier")
        aside.mkdir()
        with suppress(FileNotFoundError):
            shutil.copy(run_dir / RUN_RECORDS[0], aside)
        for path in run_dir.glob("eval/step_*.json"):
            if re.fullmatch(r"step_\d+", path.stem) and step_of(path.with_suffix("")) > step:
                path.rename(aside / path.name)
        log.warning(
            "%s and what is later is beyond step %d, from which the run goes on; it is now %s, and its records are in "
            "%s", later[0].name, step, renamed[0].name, aside
        )  # fmt: skip


def set_aside(checkpoint: Path, ending: str) -> Path:
    """Rename a checkpoint to `step_N.ENDING`, or to the first free `step_N.ENDING-2`, ... Returns the new path."""
    return checkpoint.replace(unused(checkpoint.with_name(f"{checkpoint.name}.{ending}")))
