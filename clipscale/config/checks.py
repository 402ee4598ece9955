"""What several parts ask of their settings, each with one message. Imports nothing heavy."""

from collections.abc import Collection
from pathlib import Path

from clipscale.errors import UserError
from clipscale.units import nearest, one_of, run_folder


def choice(key: str, value: object, known: Collection[str]) -> None:
    """Raise UserError where a setting is none of what it may be."""
    if value not in known:
        raise UserError(f"{key}={value}: choose {one_of(known)}{nearest(str(value), known)}")


def at_least(key: str, value: float | None, least: float) -> None:
    """Raise UserError where a number is smaller, or not a number; None, for a setting that may be left unset, is not looked at."""
    if value is not None and not value >= least:
        raise UserError(f"{key}={value}: give at least {least}")


def shared(batch: int, count: int, whom: str, remedy: str = "") -> None:
    """Raise UserError where a batch has no equal part for each of `count` processes."""
    if batch % count:
        raise UserError(f"batch={batch} cannot be shared evenly by {whom}; choose a multiple of {count}{remedy}")


def existing_run(run: str) -> Path:
    """The folder of a run that is there. Raises UserError, for a sweep with the name of one of its runs."""
    folder = run_folder(run)
    if not folder.is_dir():
        raise UserError(f"run={run}: there is no folder {folder}")
    jobs = sorted(path.parent for path in folder.glob("*/config.yaml"))
    if jobs and not (folder / "config.yaml").exists():
        raise UserError(f"run={run}: a sweep of {len(jobs)} runs; give one of them, as in run={jobs[0]}")
    return folder
