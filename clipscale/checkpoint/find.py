"""Finds the newest undamaged checkpoint, in a run's folder or its copy.

`check_fits` in `start/resolve.py` checks that the settings fit it.
"""

import logging
from functools import partial
from pathlib import Path

from clipscale.checkpoint.download import download_newer
from clipscale.checkpoint.loading import verify
from clipscale.common.errors import UserError
from clipscale.distributed.agreement import run_on_all_ranks, run_on_rank0, run_on_rank0_with_heartbeat
from clipscale.distributed.world import World
from clipscale.run_folder.paths import checkpoints_of, named_checkpoints, path_or_run
from clipscale.run_folder.set_aside import rename_checkpoint

log = logging.getLogger(__name__)


def newest_undamaged(run_dir: Path, resume: str, world: World, copy: str = "") -> Path | None:
    """The newest undamaged checkpoint that `resume` allows; None for a new run. A collective.

    Every rank verifies its share of the files. With `auto` this changes the run's folder: a newer checkpoint is
    downloaded from the copy with its records, and damaged newer ones are renamed, so that the run can save the same
    steps again.

    `resume`: `auto` (the run's own checkpoints, if there are any), `none`, the path of a checkpoint or of a run's
    folder, or a run's name. `copy`: the address of the run's copy, from which `auto` downloads a newer checkpoint.

    Raises UserError for a path without a checkpoint, and if every checkpoint is damaged.
    """
    candidates = run_on_all_ranks(world, lambda: candidates_of(run_dir, resume))
    if any(others != candidates for others in world.all_gather_object(candidates)):
        raise UserError(
            f"run={run_dir}: the processes see different checkpoints; put the folder on storage that all share"
        )
    damaged: dict[Path, str] = {}
    undamaged = None
    for candidate in candidates:
        try:
            run_on_all_ranks(world, partial(verify, candidate, world.rank, world.size))
        except UserError as error:
            damaged[candidate] = str(error)
        else:
            undamaged = candidate
            break
    if copy and run_on_rank0_with_heartbeat(world, partial(download_newer, run_dir, copy, resume, undamaged)):
        return newest_undamaged(run_dir, resume, world)
    if undamaged:
        run_on_rank0(world, partial(report_damaged, damaged, undamaged, rename=resume == "auto"))
    elif damaged:
        raise UserError(f"resume={resume}: {damaged[candidates[0]]}; no other can be read, begin another run=NAME")
    return undamaged


def candidates_of(run_dir: Path, resume: str) -> list[Path]:
    """The checkpoints that the run may resume, newest first. Raises UserError."""
    if resume == "none":
        return []
    if resume == "auto":
        return checkpoints_of(run_dir)[::-1]
    candidates = named_checkpoints(resume)
    if not candidates:
        raise UserError(f"resume={resume}: no checkpoint in {path_or_run(resume) / 'checkpoints'}")
    return candidates[::-1]


def report_damaged(damaged: dict[Path, str], used: Path, *, rename: bool) -> None:
    """Warn of the damaged checkpoints. `rename`: rename them first, so that the run can save the same steps again."""
    for path, reason in damaged.items():
        renamed = f"; it is now {rename_checkpoint(path, 'damaged').name}" if rename else ""
        log.warning("%s%s; the run continues from %s", reason, renamed, used.name)
