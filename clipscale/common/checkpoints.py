"""The folder of a run, and where its checkpoints are: RUN/checkpoints/step_00001000. Imports nothing heavy."""

import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Self

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.files import first_existing, visible_entries
from clipscale.common.run_records import EVAL
from clipscale.common.terminal import log_line

# The file of a checkpoint that holds everything but its tensors.
META = "meta.json"
LOCK = "run.lock"
# Metrics that are better if they are lower.
LOWER_IS_BETTER = ("loss", "caption_loss", "perplexity", "broken")
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


class SetLabel(NamedTuple):
    """The parts of the name of a set's results, `FOLDER/NAME (MARK) (MARK)`."""

    # The folders, then the name.
    path: tuple[str, ...]
    marks: tuple[str, ...]

    @classmethod
    def parse(cls, label: str) -> Self:
        path, *marks = label.split(" (")
        return cls(tuple(path.split("/")), tuple(mark.removesuffix(")") for mark in marks))

    def is_meant_by(self, short: "SetLabel") -> bool:
        """Whether `short` names this set. It may leave out the first folders and the last marks."""
        return self.path[-len(short.path) :] == short.path and self.marks[: len(short.marks)] == short.marks


class Goal(NamedTuple):
    """A metric on a set, `SET/METRIC` as in RUN/eval/step_N.json, by which checkpoints or runs are compared."""

    # It may leave out what `SetLabel.is_meant_by` says.
    label: str
    metric: str

    @classmethod
    def parse(cls, key: str, text: str) -> Self:
        """Raises UserError, with the setting's `key`, for another form."""
        label, _, metric = text.rpartition("/")
        if not label or not metric:
            raise UserError(f"{key}={text}: give SET/METRIC, as imagenet1k/top1")
        return cls(label, metric)

    def __str__(self) -> str:
        return f"{self.label}/{self.metric}"

    @property
    def is_minimum(self) -> bool:
        """Whether the lowest value is the best."""
        return self.metric in LOWER_IS_BETTER

    def possible_sets(self, labels: Iterable[str]) -> list[str]:
        """The sets that the goal may mean, among these."""
        short = SetLabel.parse(self.label)
        return [label for label in labels if SetLabel.parse(label).is_meant_by(short)]

    def likeliest_set(self, labels: Iterable[str]) -> str | None:
        """The set that the goal means, among these; None if there is no such set."""
        return min(self.possible_sets(labels), key=len, default=None)


@dataclass(frozen=True)
class Best:
    """Finds the best of a run's checkpoints, by the results of the run's own evaluations."""

    run: Path
    goal: Goal

    def results(self, step: int) -> dict[str, dict[str, float]]:
        """The metrics at a step of each set that the goal may mean. Empty if the step was not evaluated on any."""
        with suppress(*files.DAMAGED):
            results = files.read_record(self.run / EVAL / f"step_{step:08d}.json")["results"]
            return {label: dict(results[label]) for label in self.goal.possible_sets(results)}
        return {}

    def values(self, step: int) -> dict[str, float]:
        """Set -> its metric at a step, for the sets that the goal may mean. Values that were not measured, or are not
        numbers, are left out."""
        found = {label: metrics.get(self.goal.metric) for label, metrics in self.results(step).items()}
        return {
            label: value for label, value in found.items() if isinstance(value, int | float) and not math.isnan(value)
        }

    def among(self, steps: Iterable[int]) -> int | None:
        """The step with the best value, and the earliest in a tie; None if no step has a value.

        All steps are compared on one set, the one that most of them have. `clipscale eval` may have added another one
        to some, such as the whole set beside a part of it.
        """
        values = {step: self.values(step) for step in sorted(steps)}
        counts = Counter(label for values_of_step in values.values() for label in values_of_step)
        if not counts:
            return None
        label = min(counts, key=lambda label: (-counts[label], len(label)))
        measured = {step: values_of_step[label] for step, values_of_step in values.items() if label in values_of_step}
        choose = min if self.goal.is_minimum else max
        return choose(measured, key=measured.__getitem__)

    def report_improvement(self, step: int, pending: int | None) -> bool:
        """Print whether `step`, just evaluated, is better than all checkpoints, or that it has no result.

        `pending`: the step of a checkpoint that is perhaps not complete yet. Returns whether it is better.
        """
        values = self.values(step)
        if not values:
            there = sorted({metric for metrics in self.results(step).values() for metric in metrics})
            log_line(
                f"warning: checkpoint.best={self.goal}: step {step} has no such result; its metrics: "
                f"{', '.join(there) or 'none'}"
            )
            return False
        steps = [*map(step_of, checkpoints_of(self.run)), step]
        better = self.among(steps if pending is None else [*steps, pending]) == step
        if better:
            log_line(f"step {step} is the best so far: {self.goal} is {values[min(values, key=len)]:.4f}")
        return better


def best_of(run: Path) -> Path:
    """The checkpoint that is best by the run's setting `checkpoint.best`. Raises UserError where there is none."""
    goal = files.settings_of_run(run).get("checkpoint", {}).get("best", "")
    if not goal:
        raise UserError(f"step=best: {run} was not trained with checkpoint.best=SET/METRIC; give a step's number")
    step = Best(run, Goal.parse("checkpoint.best", goal)).among(map(step_of, checkpoints_of(run)))
    if step is None:
        raise UserError(f"step=best: no checkpoint of {run} has a {goal} in {run / EVAL}; give a step's number")
    return path_of(run, step)


def locate(run: Path, which: str) -> Path:
    """A run's checkpoint: `latest`, `best`, a step number, or a path. Raises UserError where there is none."""
    if which == "best":
        return best_of(run)
    if which == "latest":
        checkpoints = checkpoints_of(run)
        if not checkpoints:
            raise UserError(f"run={run}: no checkpoint in {run / 'checkpoints'}")
        return checkpoints[-1]
    path = path_of(run, int(which)) if which.isdecimal() else Path(which).expanduser()
    if not path.exists():
        raise UserError(f"checkpoint={which}: there is no {path}; give latest, or another step of {run}")
    return path
