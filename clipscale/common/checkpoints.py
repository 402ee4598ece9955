"""Where the checkpoints of a run are: RUN/checkpoints/step_00001000. Imports nothing heavy."""

import re
from pathlib import Path

from clipscale.common.errors import UserError

META = "meta.json"
"""In a checkpoint: everything but its tensors."""


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run, or one of its checkpoints."""
    return (folder / "checkpoints").is_dir() or (folder / META).is_file()


def path_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def checkpoints_of(run: Path) -> list[Path]:
    paths = (run / "checkpoints").glob("step_*")
    return sorted((path for path in paths if re.fullmatch(r"step_\d+", path.name)), key=step_of)


def locate(run: Path, which: str) -> Path:
    """A run's checkpoint: `latest`, a step number, or a path. Raises UserError where there is none."""
    if which == "latest":
        checkpoints = checkpoints_of(run)
        if not checkpoints:
            raise UserError(f"run={run}: no checkpoint in {run / 'checkpoints'}")
        return checkpoints[-1]
    path = path_of(run, int(which)) if which.isdecimal() else Path(which).expanduser()
    if not path.exists():
        raise UserError(f"checkpoint={which}: there is no {path}; give latest, or another step of {run}")
    return path
