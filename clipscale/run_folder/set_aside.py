"""Renames, and reports, files in a run's folder that the run cannot use: damaged records, and files of another run or
of later steps. Only result.json, the mark of a complete run, is ever deleted.
"""

import logging
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from clipscale.common.files import DAMAGED, reason_of, unused_path
from clipscale.run_folder.paths import CONFIG, EARLIER, EVAL, METRICS, RESULT, checkpoints_of, step_of
from clipscale.run_folder.records import RUN_RECORDS, read_result, written_settings

log = logging.getLogger(__name__)
T = TypeVar("T")


# ---- damaged records ----


def read_or_set_aside(path: Path, read: Callable[[Path], T]) -> T | None:
    """Return `read(path)`. A damaged file is renamed and reported; then None.

    `read` parses the file and checks its form: what it raises beside DAMAGED is a mistake of this program.
    """
    try:
        return read(path)
    except DAMAGED as error:
        rename_damaged(path, reason_of(error))
        return None


def rename_damaged(path: Path, reason: str) -> None:
    """Rename a damaged record; its run continues without it."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.damaged")
    path.rename(aside)
    log.warning("%s is damaged (%s); it is now %s, and the run continues", path, reason, aside.name)


# ---- an earlier run, and later steps ----


def set_aside_for_resume(run_dir: Path, step: int, *, starts_from_other_folder: bool) -> None:
    """Before a run goes on after `step`: set aside what it does not use in its folder.

    These are files of another run or of later steps, and a damaged config.yaml. Deletes result.json: the run is not
    complete any more.

    `starts_from_other_folder`: the run begins anew, or from a checkpoint of another folder.
    """
    if starts_from_other_folder:
        set_aside_records(run_dir)
    if (run_dir / RESULT).exists():
        read_or_set_aside(run_dir / RESULT, read_result)
    (run_dir / RESULT).unlink(missing_ok=True)
    if step:
        set_aside_later_steps(run_dir, step)
        read_or_set_aside(run_dir / CONFIG, lambda _: written_settings(run_dir))


def set_aside_records(run_dir: Path, why: str = "begins again, without a checkpoint") -> None:
    """Move the run's records into a folder of their own, and log `why`."""
    records = [record for record in RUN_RECORDS if (run_dir / record.name).exists()]
    if any(record.is_measurement and (run_dir / record.name).stat().st_size for record in records):
        aside = unused_path(run_dir / EARLIER)
        aside.mkdir()
        for record in records:
            (run_dir / record.name).rename(aside / record.name)
        log.warning("run=%s %s; its earlier records are now in %s", run_dir, why, aside)


def set_aside_later_steps(run_dir: Path, step: int) -> None:
    """Rename the checkpoints after `step`, from which a run continues, so that none of them is taken for the newest.

    A copy of the curve so far, and the results after `step`, go to a folder of their own.
    """
    later = [path for path in checkpoints_of(run_dir) if step_of(path) > step]
    renamed = [rename_checkpoint(path, "aside") for path in later]
    evaluations = [path for path in (run_dir / EVAL).glob("step_*.json") if re.fullmatch(r"step_\d+", path.stem)]
    results = [path for path in evaluations if step_of(path.with_suffix("")) > step]
    if not later and not results:
        return
    aside = unused_path(run_dir / EARLIER)
    aside.mkdir()
    with suppress(FileNotFoundError):
        shutil.copy(run_dir / METRICS, aside)
    for path in results:
        path.rename(aside / path.name)
    if later:
        log.warning(
            "%s and later ones are beyond step %d, where the run continues; it is now %s, and their records are in %s",
            later[0].name, step, renamed[0].name, aside
        )  # fmt: skip
    else:
        log.warning("evaluations beyond step %d, from which the run continues, are now in %s", step, aside)


def rename_checkpoint(checkpoint: Path, ending: str) -> Path:
    """Rename a checkpoint to `step_N.ENDING`, or to the first free `step_N.ENDING-2`, ... Returns the new path."""
    return checkpoint.replace(unused_path(checkpoint.with_name(f"{checkpoint.name}.{ending}")))
