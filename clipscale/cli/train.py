"""The verb `train`: checks the settings and what lies on this machine, plans the run, and starts it."""

import json
from pathlib import Path
from typing import Any

from clipscale.common.terminal import say
from clipscale.config.eval import check_places
from clipscale.config.stages import stages_of
from clipscale.config.train import TrainConfig, changes_since, samples_of, settled
from clipscale.data.loader.fork_server import warm_up
from clipscale.launch import local


def check(config: TrainConfig, *, starts: bool = True) -> None:
    """Every check that needs no torch, local shards among them. Raises UserError, prints warnings.

    `starts`: a run follows, so that a missing demo set is rendered.
    """
    local.check_train(config)
    if local.under_torchrun():  # there all ranks find missing shards together
        return
    from clipscale.tools.data import demo

    sources = config.data.train or ()
    if starts:
        demo.render_missing(sources)
    elif demo.is_missing(sources):
        return
    epoch = samples_of_epoch(config)
    for stage in stages_of(config):
        if epoch is not None:
            samples_of(stage, epoch)
    check_places(config.eval)


def samples_of_epoch(config: TrainConfig) -> int | None:
    """Of the data, where that is known at once. Raises UserError for shards that are not there."""
    from clipscale.data.shards.counts import counted_at_once
    from clipscale.data.shards.listing import local_shards

    shards = local_shards(config.data)
    return counted_at_once(config.data, shards) if shards else None


def finished(config: TrainConfig) -> dict[str, Any] | None:
    """What the run returned, from its folder, if it is complete with these settings; None: there is work to do."""
    folder = Path(config.run)
    if config.resume != "auto" or not (folder / "checkpoints").is_dir():
        return None
    epoch = samples_of_epoch(config) if config.samples is None and not config.stages else None
    if config.samples is None and epoch is None:
        return None
    step = sum(samples_of(stage, epoch) // stage.batch for stage in stages_of(config))
    saved = folder / "checkpoints" / f"step_{step:08d}" / "meta.json"
    evaluated = folder / "eval" / f"step_{step:08d}.json"
    described = ("model.preprocess",) if config.model.weights else ()  # by the weights
    changes = [change for change in changes_since(folder / "config.yaml", config) if not change.startswith(described)]
    if changes or not saved.is_file() or not (folder / "config.yaml").is_file():
        return None
    results = json.loads(evaluated.read_text(encoding="utf-8"))["results"] if evaluated.is_file() else {}
    if config.eval.suite != "none" or len(results) < len(config.eval.sets):
        return None
    values = json.loads(saved.read_text(encoding="utf-8"))["meta"]["values"]
    return {"run": str(folder), "step": step, "loss": values["loss"], "eval": results}


def main(config: TrainConfig, *, isolated: bool = False) -> dict[str, Any]:
    """Say whether the run fits this machine, then start it. torchrun's workers start without a plan.

    `isolated`: in processes of its own, also if it is one. Raises as `launch.local.run` does, and UserError for a run
    that cannot fit.
    """
    config = settled(config)
    result = None if local.under_torchrun() else finished(config)
    if result:
        from clipscale.log.table import print_results

        step = result["step"]
        say(f"run={config.run} is complete at step {step}: nothing is left to train; more samples= go on with it")
        print_results(result["eval"], f"{Path(config.run).name}, step {step}")
        return result
    if not isolated and config.data.workers != 0:
        warm_up()  # beside the imports of planning and training
    if config.plan and not local.under_torchrun():
        from clipscale.launch.run_lock import check_free
        from clipscale.tools.plan.of_run import before

        check_free(Path(config.run))
        before(config, local.workers(config))
    return local.run(config, isolated=isolated)
