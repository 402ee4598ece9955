"""The last lines of a run: its results, beside the first and the published ones, and its best checkpoint."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from clipscale.common.terminal import log_line
from clipscale.eval.published import published_line
from clipscale.eval.run import ResultsFile
from clipscale.log.table import print_results, with_start
from clipscale.run_folder.chosen_checkpoint import BestFinder
from clipscale.run_folder.paths import checkpoints_of, step_of
from clipscale.run_folder.records import RunResult


def print_summary(
    result: RunResult, *, precision: str, expected: Mapping[str, object], best: BestFinder | None
) -> None:
    """Print the last lines. `precision`: the one of the run's evaluations. `expected`: the setting. `best`: see
    `checkpoint.Retention`."""
    folder = Path(result["run"])
    step = result["step"]
    results = result["eval"]
    start_results = ResultsFile(folder, 0).record()["results"]
    print_results(with_start(results, start_results), f"{folder.name}, step {step}, {precision}")
    if line := published_line(expected, results):
        log_line(line)
    log_line(f"done: {folder} (step {step}, loss {result['loss']:.4f})")
    if best:
        best_step = best.best_step(map(step_of, checkpoints_of(folder)))
        line = f"best by {best.goal}: step {best_step}" if best_step else f"no checkpoint has a {best.goal}"
        log_line(f"{line}; the start was better" if best_step and best.best_step([0, best_step]) == 0 else line)
    log_line(f"clipscale report {shlex.quote(str(folder))} shows it")
