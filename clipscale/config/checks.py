"""Checks of settings, each with one message."""

from collections.abc import Collection
from functools import reduce
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any

from clipscale.common.errors import UserError
from clipscale.common.units import nearest, one_of, run_folder
from clipscale.config.setting import Setting, settings_of

BOUNDS = {"least": (ge, "at least"), "above": (gt, "more than"), "below": (lt, "less than"), "most": (le, "at most")}


def check_values(config: Any, prefix: str = "") -> None:
    """Check every field of a settings object against what it declares. `prefix` comes before the names in messages.

    Raises UserError for the first wrong value.
    """
    for declared in settings_of(type(config)):
        check_value(declared, reduce(getattr, declared.name.split("."), config), prefix)


def check_value(declared: Setting, value: Any, prefix: str = "") -> None:
    """Raise UserError for a value that the setting does not accept. None, which stands for one that is not set, is accepted."""
    key = prefix + declared.name
    if declared.choices is not None:
        choice(key, value, declared.choices)
    for name, (holds, words) in BOUNDS.items():
        bound = getattr(declared, name)
        if bound is not None and value is not None and not holds(value, bound):  # NaN is refused, too
            raise UserError(f"{key}={value}: give {words} {bound}")
    if declared.check:
        try:
            declared.check(key, value)
        except ValueError as error:
            raise UserError(error) from error


def choice(key: str, value: object, known: Collection[str]) -> None:
    """Raise UserError for a value that is none of `known`."""
    if value not in known:
        raise UserError(f"{key}={value}: choose {one_of(known)}{nearest(str(value), known)}")


def shared(batch: int, count: int, among: str, remedy: str = "") -> None:
    """Raise UserError for a batch that `count` processes cannot share evenly; the message calls them `among`."""
    if batch % count:
        raise UserError(f"batch={batch} cannot be shared evenly by {among}; choose a multiple of {count}{remedy}")


def existing_run(run: str) -> Path:
    """The folder of a run. Raises UserError if there is none, or if it is a sweep, with the name of one of its runs."""
    folder = run_folder(run)
    if not folder.is_dir():
        raise UserError(f"run={run}: there is no folder {folder}")
    jobs = sorted(path.parent for path in folder.glob("*/config.yaml"))
    if jobs and not (folder / "config.yaml").exists():
        raise UserError(f"run={run}: a sweep of {len(jobs)} runs; give one of them, as in run={jobs[0]}")
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
