"""The folder of a run, and where its checkpoints are: RUN/checkpoints/step_00001000. Imports nothing heavy."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.common.files import visible

# The file of a checkpoint that holds everything but its tensors.
META = "meta.json"
LOCK = "run.lock"
# The file of a run's folder with what the run returned. It exists only when the run is complete.
RESULT = "result.json"
# Suffixes of files that a shell or a scheduler may write into a run's folder before the run.
LOGS = (".log", ".out", ".err", ".txt")


def check_own(run: Path) -> None:
    """Raise UserError for a folder that holds other files, also below checkpoints/, but no run's lock and no
    checkpoint."""
    lock = run / LOCK
    ours = lock.is_file() and lock.read_bytes()[:8] in b"process "  # which RunLock writes, and empties at its end
    if not run.is_dir() or ours or any((path / META).is_file() for path in checkpoints_of(run)):
        return
    inside = run / "checkpoints"
    for path in (*visible(run), *(visible(inside) if inside.is_dir() else ())):
        if path.suffix not in LOGS and path != inside:
            raise UserError(
                f"run={run} is no folder of a run: it holds {path.relative_to(run)}; choose another run=NAME"
            )


def check_place(run: Path) -> None:
    """Raise UserError for a folder that surely cannot be made or written. Writes nothing."""
    there = next(path for path in (run, *run.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        reason = "cannot be written" if there.is_dir() else "is a file"
        raise UserError(f"run={run} cannot be written ({there} {reason}); choose another run=PATH")


def check_address(address: str) -> None:
    """Raise UserError for a `checkpoint.copy` that fsspec cannot open, whose files end with this process, or that it
    takes for a pattern. Asks no server."""
    protocol, slashes, _ = address.partition("://")
    if not slashes or protocol == "file":
        return
    import fsspec
    from fsspec.registry import known_implementations

    known = known_implementations.get(protocol, {})
    if protocol not in fsspec.available_protocols():
        raise UserError(f"checkpoint.copy={address}: there is no {protocol}; give a folder, or s3://BUCKET/PATH")
    if protocol == "memory" or re.search(r"[*?[]", address):
        raise UserError(f"checkpoint.copy={address}: give a folder, or an address in a bucket without * ? [")
    if "class" in known and find_spec(known["class"].partition(".")[0]) is None:
        raise UserError(f"checkpoint.copy={address}: {known.get('err', 'its library is not installed')}")


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
