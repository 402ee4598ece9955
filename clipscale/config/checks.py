"""Checks of settings that more than one verb makes, each with one message."""

from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.common.units import run_folder


def shared(batch: int, count: int, among: str, remedy: str = "") -> None:
    """Raise UserError for a batch that `count` processes cannot share evenly; the message calls them `among`."""
    if batch % count:
        raise UserError(f"batch={batch} cannot be shared evenly by {among}; choose a multiple of {count}{remedy}")


def existing_run(run: str) -> Path:
    """The folder of a run. Raises UserError if none is given, or there is none, or if it is a sweep."""
    if not run:
        raise UserError("run is not set; give run=NAME or run=PATH")
    folder = run_folder(run)
    if not folder.is_dir():
        raise UserError(f"run={run}: there is no folder {folder}")
    runs = sorted(path.parent for path in folder.glob("*/config.yaml"))
    if runs and not (folder / "config.yaml").exists():
        raise UserError(f"run={run}: a sweep of {len(runs)} runs; give one of them, as in run={runs[0]}")
    return folder
