"""The verb `clipscale eval`: evaluates a run's checkpoint, or any weights. Every process does its share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from clipscale import distributed, files
from clipscale.config.redact import incomplete, restored
from clipscale.config.tools import EvalRunConfig, check_eval
from clipscale.errors import UserError
from clipscale.eval.results import Results
from clipscale.eval.run import check, evaluate
from clipscale.launch import local
from clipscale.models.towers import build_model, load_model
from clipscale.models.weights import described
from clipscale.precision import Precision
from clipscale.report.table import print_results


def main(config: EvalRunConfig) -> Results:
    """Evaluate, on `launch.procs` processes or as one of torchrun's. Without `eval.sets` it takes the run's own. Raises UserError."""
    folder = check_eval(config)
    if not config.eval.sets:
        config.eval.sets = _sets_of(folder / "config.yaml")
    work = "clipscale.eval.verb:work"
    return local.join(config, work) if local.under_torchrun() else local.run(config, work)


def work(config: EvalRunConfig) -> Results:
    """One process's part. Rank 0 prints a table. Raises UserError."""
    folder = check_eval(config)
    world = distributed.start(config.device, config.launch.threads, config.launch.timeout_s)
    about: dict[str, Any] = {"precision": config.precision.name}
    step = None
    try:
        check(config.eval, world)  # before the model is loaded: a mistyped path is reported at once
        precision = Precision(config.precision, world.device)
        if config.run:
            model, _, step = load_model(folder, config.checkpoint, config.eval.weights, hub=config.hub)
            about["checkpoint"] = config.checkpoint
        else:
            found = world.on_main(
                lambda: described(replace(config.model, hub=config.model.hub or config.hub))
            )  # one process downloads, if there is something to
            model = build_model(found)
            about |= {"model": found.name, "source": config.model.weights}
        model.to(world.device)
        for tower in (model.image, model.text):
            precision.convert(tower)
        results = evaluate(
            model, config.eval, world, autocast=precision.autocast, run_dir=folder, step=step, about=about
        )
    finally:
        distributed.stop()
    if world.main:
        print_results(results, folder.name if step is None else f"{folder.name}, step {step}")
    return results


def _sets_of(settings: Path) -> list[str]:
    """The evaluation sets in the run's settings. Raises UserError where there are none."""
    with files.reported("eval.sets", settings, "give eval.sets=[FOLDER,...]"):
        record = files.read_tree(settings) if settings.is_file() else {}
    found = record["eval"].get("sets") if isinstance(record.get("eval"), dict) else None
    if found and not (isinstance(found, list) and all(isinstance(one, str) for one in found)):
        raise UserError(f"eval.sets: {settings} holds no list of folders; give eval.sets=[FOLDER,...]")
    sets = restored(found or [])
    if not sets:
        raise UserError("eval.sets is empty, here and in the settings of a run; give eval.sets=[FOLDER,...]")
    if any(map(incomplete, sets)):
        raise UserError(
            f"eval.sets={sets}: the run's settings hold no secrets; give eval.sets again, or set the variable"
        )
    return list(sets)
