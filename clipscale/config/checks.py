"""Checks of settings that more than one verb makes, each with one message."""

from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.common.units import run_folder


def shared(batch: int, count: int, among: str, remedy: str = "") -> None:
    """Raise UserError for a batch that `count` processes cannot share evenly; the message calls them `among`."""
    if batch % count:
        raise UserError(f"batch={batch} cannot be shared evenly by {among}; choose a multiple of {count}{remedy}")


def existing_run(run: str) -> Path:
    """The folder of a run. Raises UserError if there is none, or if it is a sweep, with the name of one of its runs."""
    folder = run_folder(run)
    if not folder.is_dir():
        raise UserError(f"run={run}: there is no folder {folder}")
    runs = sorted(path.parent for path in folder.glob("*/config.yaml"))
    if runs and not (folder / "config.yaml").exists():
        raise UserError(f"run={run}: a sweep of {len(runs)} runs; give one of them, as in run={runs[0]}")
    return folder


def one_model(run: str, weights: str | None, verb: str, remedy: str = "give one of them") -> Path | None:
    """The folder of the run; None for weights of another source. Raises UserError if neither is given, or both."""
    if run and weights:
        raise UserError(f"run={run} and model.weights={weights} are two models; {remedy}")
    if not run and not weights:
        raise UserError(f"{verb} needs run=NAME or run=PATH, or a model: model=vit-b32 model.weights=laion2b_s34b_b79k")
    return existing_run(run) if run else None


def begun_run(run: str) -> Path:
    """The folder of a run that has written its settings and metrics. Raises UserError if a file is missing."""
    folder = run_folder(run)
    for name in ("config.yaml", "env.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise UserError(f"run={run}: there is no {folder / name}; give the folder of a run that has begun")
    return folder
