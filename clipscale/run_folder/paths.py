"""The paths of a run: its folder, its checkpoints (RUN/checkpoints/step_N) and other files. Imports nothing heavy."""

import re
import shlex
from pathlib import Path
from typing import cast

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.record import Record
from clipscale.common.text import did_you_mean

# The file of a checkpoint that holds everything but its tensors.
META = "meta.json"
LOCK = "run.lock"
# Suffixes of files that a shell or a scheduler may write into a run's folder before the run.
LOG_SUFFIXES = (".log", ".out", ".err", ".txt")
# One JSON object a step.
METRICS = "metrics.jsonl"
# The beginning of the names of folders with records that a run has set aside.
EARLIER = "earlier"
# The folder of evaluations.
EVAL = "eval"
# The run's result. It exists only when the run is complete.
RESULT = "result.json"
# The settings.
CONFIG = "config.yaml"
# Machine, versions and commit.
ENVIRONMENT = "env.json"


def run_folder(name: str) -> Path:
    """`runs/NAME` for a plain name; anything with a slash is a path."""
    return Path(name).expanduser() if "/" in name or name in (".", "..") else Path("runs") / name


def path_or_run(name: str) -> Path:
    """The path, if there is one, or else the folder of the run of that name."""
    path = Path(name).expanduser()
    return path if path.exists() else run_folder(name)


def runs_of_sweep(folder: Path) -> list[Path]:
    """The folders of a sweep's runs; empty if this is a run's folder, or no folder."""
    if (folder / CONFIG).exists():
        return []
    return sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))


def existing_run(run: str) -> Path:
    """The folder of a run. Raises UserError if none is given, or there is none, or if it is a sweep."""
    if not run:
        raise UserError("run is not set; give run=NAME or run=PATH")
    folder = run_folder(run)
    if not folder.is_dir():
        near = did_you_mean(folder.name, sorted(path.name for path in folder.parent.glob("*/")))
        raise UserError(f"run={run}: there is no folder {folder}{near}")
    runs = runs_of_sweep(folder)
    if runs:
        raise UserError(
            f"run={run}: a sweep of {len(runs)} runs; give one of them, as in {shlex.quote(f'run={runs[0]}')}"
        )
    return folder


# ---- checkpoints ----


def checkpoint_to_resume(run: str, resume: str, *, own_first: bool) -> Path | None:
    """The checkpoint that a start resumes if it is undamaged: the run's own newest one, or that of `resume=PATH`.

    None if there is none. `run`: its name, or empty. `own_first`: the run's own comes before `resume=PATH`.
    """
    if resume == "none":
        return None
    own = checkpoints_of(run_folder(run)) if run else []
    named = [] if resume == "auto" else named_checkpoints(resume)
    checkpoints = (own or named) if own_first else (named or own)
    return checkpoints[-1] if checkpoints else None


def run_to_resume(run: str, resume: str, *, own_first: bool = True) -> Path | None:
    """The folder of the run of `checkpoint_to_resume`."""
    checkpoint = checkpoint_to_resume(run, resume, own_first=own_first)
    return checkpoint.parent.parent if checkpoint else None


def named_checkpoints(resume: str) -> list[Path]:
    """The checkpoints of `resume=PATH`, by step: the one at the path, or all of that run's."""
    path = path_or_run(resume)
    return [path] if path in checkpoints_of(path.parent.parent) else checkpoints_of(path)


def is_run_or_checkpoint(folder: Path) -> bool:
    """Whether this is the folder of a run, or one of its checkpoints."""
    return (folder / "checkpoints").is_dir() or (folder / META).is_file()


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """The path of a run's checkpoint of a step, whether it is there or not."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step_"))


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The paths of a run's checkpoints, by step."""
    paths = (run_dir / "checkpoints").glob("step_*")
    return sorted((path for path in paths if re.fullmatch(r"step_\d+", path.name)), key=step_of)


def checkpoint_values(checkpoint: Path) -> Record:
    """A checkpoint's values other than tensors, without torch and without a look at their checksum.

    A start reads them by `checkpoint.read_description`. Raises files.DAMAGED_OR_FOREIGN.
    """
    files.check_inside(checkpoint / META, checkpoint)
    return cast(Record, files.read_json(checkpoint / META)["meta"]["values"])


def check_is_run_folder(run_dir: Path) -> None:
    """Raise UserError for a folder that is not a run's: it has files, but neither a run's lock nor a checkpoint.

    Files below checkpoints/ count. Files with LOG_SUFFIXES do not.
    """
    lock = run_dir / LOCK
    # RunLock writes "process ..." into it, and empties it at its end.
    ours = lock.is_file() and b"process ".startswith(lock.read_bytes()[:8])
    if not run_dir.is_dir() or ours or any((path / META).is_file() for path in checkpoints_of(run_dir)):
        return
    inside = run_dir / "checkpoints"
    for path in (*files.visible_entries(run_dir), *(files.visible_entries(inside) if inside.is_dir() else ())):
        if path.suffix not in LOG_SUFFIXES and path != inside:
            name = path.relative_to(run_dir)
            raise UserError(f"run={run_dir} is not the folder of a run: it holds {name}; choose another run=NAME")
