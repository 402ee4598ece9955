"""The folder of a run, and where its checkpoints are: RUN/checkpoints/step_00001000. Imports nothing heavy."""

import os
import re
import tempfile
from importlib.util import find_spec
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.common.files import first_existing, visible_entries

# The file of a checkpoint that holds everything but its tensors.
META = "meta.json"
LOCK = "run.lock"
# Suffixes of files that a shell or a scheduler may write into a run's folder before the run.
LOG_SUFFIXES = (".log", ".out", ".err", ".txt")


def check_own(run: Path) -> None:
    """Raise UserError for a folder that is not a run's: it has files, but neither a run's lock nor a checkpoint.

    Files below checkpoints/ count. Files with LOG_SUFFIXES do not.
    """
    lock = run / LOCK
    # RunLock writes "process ..." into it, and empties it at its end.
    ours = lock.is_file() and b"process ".startswith(lock.read_bytes()[:8])
    if not run.is_dir() or ours or any((path / META).is_file() for path in checkpoints_of(run)):
        return
    inside = run / "checkpoints"
    for path in (*visible_entries(run), *(visible_entries(inside) if inside.is_dir() else ())):
        if path.suffix not in LOG_SUFFIXES and path != inside:
            raise UserError(
                f"run={run} is no folder of a run: it holds {path.relative_to(run)}; choose another run=NAME"
            )


def check_place(folder: Path, key: str = "run") -> None:
    """Raise UserError for a folder that cannot be made or written. Leaves nothing. `key`: the setting that names it."""
    there = first_existing(folder)
    reason = ""
    if not there.is_dir():
        reason = "is a file"
    elif not os.access(there, os.W_OK | os.X_OK):
        reason = "cannot be written"
    else:
        try:  # /proc is writable by its permissions
            tempfile.TemporaryDirectory(prefix=".clipscale-", dir=there).cleanup()
        except OSError as error:
            reason = f"takes no folder: {error.strerror}"
    if reason:
        raise UserError(f"{key}={folder} cannot be written ({there} {reason}); choose another {key}=PATH")


def check_copy_address(address: str) -> None:
    """Raise UserError for a `checkpoint.copy` that cannot keep a copy. Asks no server.

    It cannot if fsspec cannot open it, if fsspec takes it for a pattern, or if its files end with this process.
    """
    protocol, slashes, _ = address.partition("://")
    if not slashes or protocol == "file":
        return
    import fsspec
    from fsspec.registry import known_implementations

    library = known_implementations.get(protocol, {})
    if protocol not in fsspec.available_protocols():
        raise UserError(f"checkpoint.copy={address}: there is no {protocol}; give a folder, or s3://BUCKET/PATH")
    if protocol == "memory" or re.search(r"[*?[]", address):
        raise UserError(f"checkpoint.copy={address}: give a folder, or an address in a bucket without * ? [")
    if "class" in library and find_spec(library["class"].partition(".")[0]) is None:
        raise UserError(f"checkpoint.copy={address}: {library.get('err', 'its library is not installed')}")


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run, or one of its checkpoints."""
    return (folder / "checkpoints").is_dir() or (folder / META).is_file()


def path_of(run: Path, step: int) -> Path:
    """The path of a run's checkpoint of a step, whether it is there or not."""
    return run / "checkpoints" / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step_"))


def checkpoints_of(run: Path) -> list[Path]:
    """The paths of a run's checkpoints, by step."""
    paths = (run / "checkpoints").glob("step_*")
    return sorted((path for path in paths if re.fullmatch(r"step_\d+", path.name)), key=step_of)
