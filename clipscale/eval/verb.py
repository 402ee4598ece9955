"""The verb `clipscale eval`: evaluates a run's checkpoint. Every process does its share."""

from pathlib import Path

import yaml

from clipscale import distributed
from clipscale.config.redact import incomplete, restored
from clipscale.config.tools import EvalRunConfig, check_run
from clipscale.errors import UserError
from clipscale.eval.results import Results
from clipscale.eval.run import check, evaluate
from clipscale.launch import local
from clipscale.models.towers import load_model
from clipscale.precision import Precision
from clipscale.report.table import print_results


def main(config: EvalRunConfig) -> Results:
    """Evaluate, on `launch.procs` processes or as one of torchrun's. Without `eval.sets` it takes the run's own. Raises UserError."""
    folder = check_run(config)
    if not config.eval.sets:
        config.eval.sets = _sets_of(folder / "config.yaml")
    work = "clipscale.eval.verb:work"
    return local.join(config, work) if local.under_torchrun() else local.run(config, work)


def work(config: EvalRunConfig) -> Results:
    """One process's part. Rank 0 prints a table. Raises UserError."""
    folder = check_run(config)
    world = distributed.start(config.device, config.launch.threads, config.launch.timeout_s)
    try:
        check(config.eval, world)  # before the model is loaded: a mistyped path is reported at once
        precision = Precision(config.precision, world.device)
        model, _, step = load_model(folder, config.checkpoint, config.eval.weights, hub=config.hub)
        model.to(world.device)
        results = evaluate(
            model,
            config.eval,
            world,
            autocast=precision.autocast,
            run_dir=folder,
            step=step,
            about={"precision": config.precision.name, "checkpoint": config.checkpoint},
        )
    finally:
        distributed.stop()
    if world.main:
        print_results(results, f"{folder.name}, step {step}")
    return results


def _sets_of(settings: Path) -> list[str]:
    """The evaluation sets in the run's settings. Raises UserError where there are none."""
    record = yaml.safe_load(settings.read_text()) if settings.is_file() else None
    sets = restored((record or {}).get("eval", {}).get("sets", []))
    if not sets:
        raise UserError("eval.sets is empty, here and in the run's own settings; give eval.sets=[FOLDER,...]")
    if any(map(incomplete, sets)):
        raise UserError(
            f"eval.sets={sets}: the run's settings hold no secrets; give eval.sets again, or set the variable"
        )
    return list(sets)
