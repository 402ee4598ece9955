"""Chooses one of a run's checkpoints: the newest, the one of a step, or the best by the run's evaluations."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.goal import Goal
from clipscale.common.terminal import log_line, log_warning
from clipscale.run_folder.paths import EVAL, checkpoint_path, checkpoints_of, step_of
from clipscale.run_folder.records import read_evaluation, settings_of_run


@dataclass(frozen=True)
class BestFinder:
    """Finds the best of a run's checkpoints, by the results of the run's own evaluations."""

    run_dir: Path
    goal: Goal

    def results(self, step: int) -> dict[str, dict[str, float]]:
        """The metrics at a step of each set that the goal may mean. Empty if the step was not evaluated on any."""
        try:
            record = read_evaluation(self.run_dir / EVAL / f"step_{step:08d}.json")
        except files.DAMAGED:
            return {}
        results = record.get("results", {})
        return {label: dict(results[label]) for label in self.goal.possible_sets(results)}

    def values(self, step: int) -> dict[str, float]:
        """Set -> its metric at a step, for the sets that the goal may mean. Values that were not measured, or are not
        numbers, are left out."""
        found = {label: metrics.get(self.goal.metric) for label, metrics in self.results(step).items()}
        return {
            label: value for label, value in found.items() if isinstance(value, int | float) and not math.isnan(value)
        }

    def best_step(self, steps: Iterable[int]) -> int | None:
        """The step with the best value, and the earliest in a tie; None if no step has a value.

        All steps are compared on the set that most of them have. Some steps may have results on more sets, which
        `clipscale eval` has added.
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
            log_warning(
                f"checkpoint.best={self.goal}: step {step} has no such result; its metrics: "
                f"{', '.join(there) or 'none'}"
            )
            return False
        steps = [*map(step_of, checkpoints_of(self.run_dir)), step]
        better = self.best_step(steps if pending is None else [*steps, pending]) == step
        if better:
            log_line(f"step {step} is the best so far: {self.goal} is {values[min(values, key=len)]:.4f}")
        return better


def best_checkpoint(run_dir: Path) -> Path:
    """The checkpoint that is best by the run's setting `checkpoint.best`. Raises UserError where there is none."""
    goal = settings_of_run(run_dir).get("checkpoint", {}).get("best", "")
    if not goal:
        raise UserError(f"step=best: {run_dir} was not trained with checkpoint.best=SET/METRIC; give a step's number")
    step = BestFinder(run_dir, Goal.parse("checkpoint.best", goal)).best_step(map(step_of, checkpoints_of(run_dir)))
    if step is None:
        raise UserError(f"step=best: no checkpoint of {run_dir} has a {goal} in {run_dir / EVAL}; give a step's number")
    return checkpoint_path(run_dir, step)


def find_checkpoint(run_dir: Path, which: str) -> Path:
    """A run's checkpoint: `latest`, `best`, a step number, or its path. Raises UserError where there is none."""
    if which == "best":
        return best_checkpoint(run_dir)
    checkpoints = checkpoints_of(run_dir)
    if which == "latest":
        if not checkpoints:
            raise UserError(f"run={run_dir}: no checkpoint in {run_dir / 'checkpoints'}")
        return checkpoints[-1]
    path = checkpoint_path(run_dir, int(which)) if which.isdecimal() else Path(which).expanduser()
    if not path.exists():
        raise UserError(f"checkpoint={which}: there is no {path}; give latest, or another step of {run_dir}")
    if path.resolve() not in [own.resolve() for own in checkpoints]:  # its results would replace the run's own
        raise UserError(f"checkpoint={which}: no checkpoint of {run_dir}; give a step of it, or the other run=NAME")
    return path
