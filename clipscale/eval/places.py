"""Checks that what the settings of an evaluation name is there: a run, its checkpoint, sets. Needs no torch."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from clipscale.common.errors import UserError
from clipscale.common.files import file_name
from clipscale.config.eval import EvalRunConfig, check_one_model, results_name
from clipscale.config.sections import PRECISIONS, EvalConfig
from clipscale.run_folder.chosen_checkpoint import find_checkpoint
from clipscale.run_folder.paths import existing_run, run_folder
from clipscale.run_folder.records import settings_of_run


def check_places(config: EvalConfig, rendered: Iterable[str] = ()) -> None:
    """Raises UserError for sets that do not exist, except those in `rendered`, which the start makes."""
    for path in sorted(set(config.sets).difference(rendered)):
        if not Path(path).expanduser().exists():
            raise UserError(f"eval.sets: {path} does not exist; give the folder of a set, or a caption file")
    if config.suite != "none" and config.root is None:
        raise UserError(f"eval.suite={config.suite} needs eval.root=DIR, the folder with its sets")
    if config.root is not None and not Path(config.root).expanduser().is_dir():
        raise UserError(f"eval.root={config.root}: there is no such folder; give the one with the sets")


def completed_by_run(config: EvalRunConfig) -> EvalRunConfig:
    """Complete the settings with the run's `sets`, `suite`, `root` and `precision` where they give none.

    The run's `root` counts for a suite alone.

    Raises UserError if there is no set.
    """
    run_settings = settings_of_run(run_folder(config.run)) if config.run else {}
    eval_of_run = run_settings.get("eval", {})
    chosen = config.eval
    if not chosen.has_sets:
        chosen = replace(chosen, sets=eval_of_run.get("sets", []), suite=eval_of_run.get("suite", "none"))
    if not chosen.has_sets:
        raise UserError("eval.sets is empty, here and in the settings of a run; give eval.sets=FOLDER")
    candidates = (config.precision, run_settings.get("precision"))
    precision = next((name for name in candidates if name in PRECISIONS), "fp32")
    if chosen.suite != "none" and not chosen.root:
        chosen = replace(chosen, root=eval_of_run.get("root"))
    return replace(config, eval=chosen, precision=precision)


def check_eval(config: EvalRunConfig) -> Path:
    """The folder of the results. Raises UserError if no model is given, or two, and for what is missing."""
    check_one_model(config, config.eval.weights)
    folder = existing_run(config.run) if config.run else None
    if folder and config.out:
        raise UserError(f"out={config.out}: the results of a run are in its folder; leave it out")
    check_places(completed_by_run(config).eval)
    if folder:
        find_checkpoint(folder, config.which)
        return folder
    return Path(config.out).expanduser() if config.out else run_folder(file_name(results_name(config.model)))
