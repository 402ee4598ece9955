"""The verb `clipscale eval`: evaluates a run's checkpoints, or any weights. Every process does its share."""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.common.terminal import say
from clipscale.config.secrets import restored
from clipscale.config.sections import EvalConfig, SinkConfig
from clipscale.config.tools import EvalRunConfig, check_eval
from clipscale.distributed.world import World, join, leave
from clipscale.eval.results import Results
from clipscale.eval.run import check, evaluate
from clipscale.eval.suites import chosen_sets, suite_table
from clipscale.launch import local
from clipscale.models.towers import ClipModel
from clipscale.models.trained import load_any
from clipscale.report.page import write_report
from clipscale.report.sinks import Sinks
from clipscale.report.table import plain_console, print_results
from clipscale.step.precision import Precision


def main(config: EvalRunConfig) -> Results:
    """Evaluate, on `launch.procs` processes or as one of torchrun's. Without sets it takes the run's own, and without a
    root the run's.

    Raises UserError.
    """
    folder = check_eval(config)
    if not config.eval.wanted or (config.eval.suite != "none" and config.eval.root is None):
        _complete(config.eval, folder / "config.yaml")
    work = "clipscale.eval.verb:work"
    return local.run(config, work)


def work(config: EvalRunConfig) -> Results:
    """One process's part. Rank 0 prints tables. Returns the results, of `checkpoint=all` those of the newest. Raises
    UserError.
    """
    folder = check_eval(config)
    world = join(config.device, config.launch.timeout_s)
    results: Results = {}
    try:
        check(config.eval, world)  # before a model is loaded: a mistyped path is reported at once
        every = bool(config.run) and config.checkpoint == "all"
        which = world.on_main(lambda: _checkpoints(folder)) if every else [config.checkpoint]
        with closing(Sinks(folder, config.log if world.main else SinkConfig(), {}, say)) as sinks:
            for path in which:
                model, step, about = world.on_all(partial(_model, config, folder, path, world))
                results = _results(config, folder, world, model, step, about)
                if world.main and step is not None:
                    sinks.eval(step, results)
                del model
    finally:
        leave()
    if every and world.main and (folder / "metrics.jsonl").is_file():  # with the results of all checkpoints as curves
        say(write_report(folder))
    return results


def _checkpoints(folder: Path) -> list[str]:
    """The paths of a run's checkpoints, oldest first. Raises UserError if there is none."""
    checkpoint.locate(folder, "latest")
    return [str(path) for path in checkpoint.found(folder)]


def _model(
    config: EvalRunConfig, folder: Path, which: str, world: World
) -> tuple[ClipModel, int | None, dict[str, Any]]:
    """The model, its step, and what is known of it. Raises UserError."""
    run = folder if config.run else None
    model, settings, step = load_any(run, which, config.eval.weights, config.model, world.on_main)
    if run:
        return model, step, {"checkpoint": Path(which).name}
    return model, step, {"model": settings.name, "source": config.model.weights}


def _results(
    config: EvalRunConfig, folder: Path, world: World, model: ClipModel, step: int | None, about: dict[str, Any]
) -> Results:
    """Evaluate one model, and print its results."""
    precision = Precision(config.precision, world.device)
    model.to(world.device)
    about = {"precision": config.precision.name} | about
    results = evaluate(model, config.eval, world, autocast=precision.autocast, run_dir=folder, step=step, about=about)
    if world.main:
        title = folder.name if step is None else f"{folder.name}, step {step}"
        print_results(results, title)
        if config.eval.suite != "none":
            plain_console().print(suite_table(config.eval.suite, chosen_sets(config.eval), results, title))
    return results


def _complete(config: EvalConfig, settings: Path) -> None:
    """Set what is not given of `sets`, `suite` and `root` as in the run's settings. Raises UserError where they have no
    sets either.
    """
    saved = yaml.safe_load(settings.read_text(encoding="utf-8")).get("eval", {}) if settings.is_file() else {}
    if not config.wanted:
        config.sets, config.suite = restored(saved.get("sets", [])), saved.get("suite", "none")
    if config.root is None:
        config.root = restored(saved.get("root"))
    if not config.wanted:
        raise UserError("eval.sets is empty, here and in the settings of a run; give eval.sets=[FOLDER,...]")
