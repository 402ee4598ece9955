"""The verb `clipscale eval`: evaluates a run's checkpoints, or any weights. Every process does its share."""

from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from clipscale.common.record import Results
from clipscale.common.terminal import Progress, is_main_rank, log_line, show_task
from clipscale.distributed.agreement import run_on_all_ranks, run_on_rank0_with_heartbeat
from clipscale.distributed.join import destroy_world, init_world
from clipscale.eval.run import Evaluation, ResultsFile, evaluate
from clipscale.eval.suites import load_chosen_sets, suite_table
from clipscale.launch import local
from clipscale.log.sinks import log_wandb_mode, open_sinks
from clipscale.log.table import print_results, show
from clipscale.models.weights.model_settings import with_checkpoints_of_runs
from clipscale.run_folder.records import settings_of_run
from clipscale.step.precision import Precision
from clipscale.tools.eval.settings import EvalRunConfig, check_eval, completed_by_run, model_facts
from clipscale.tools.trained_model import load_run_or_weights


def main(config: EvalRunConfig) -> Results:
    """Evaluate, on `launch.procs` processes or as one of torchrun's. Raises UserError."""
    # Results of a run that trains on are of this checkpoint.
    complete_config = replace(completed_by_run(config), model=with_checkpoints_of_runs(config.model))
    if is_main_rank() and not config.eval.has_sets:
        log_line(f"eval.sets: {complete_config.eval.sets or complete_config.eval.root}, named by the run's config.yaml")
    return local.launch(complete_config, work)


def objective_and_sizes(run_dir: Path) -> tuple[str, list[int]]:
    """A run's objective, in its last stage if it has stages, and the sizes of its features."""
    run_settings = settings_of_run(run_dir)
    loss = {"objective": "softmax", **run_settings.get("loss", {})}
    last_stage = (run_settings.get("stages") or [{}])[-1]
    return str(last_stage.get("loss", loss["objective"])), loss.get("sizes", [])


def work(config: EvalRunConfig) -> Results:
    """Do one process's part of the evaluation. Rank 0 prints tables."""
    folder = check_eval(config)
    run = folder if config.run else None
    world = init_world(config.device, config.launch.timeout_s)
    try:
        # before a model is loaded, so that a mistyped path is reported at once
        sets = run_on_all_ranks(world, lambda: load_chosen_sets(config.eval))
        precision = Precision.set_up(config.precision, world.device)
        wandb_mode = config.log.wandb_mode if world.is_rank0 else "disabled"
        if world.is_rank0:
            log_wandb_mode(config.log.wandb, wandb_mode)
        model_settings = {} if run else {"model": asdict(config.model)}  # wandb has a run's settings from its training
        with_tensorboard = world.is_rank0 and config.log.tensorboard
        with closing(open_sinks(folder, wandb_mode, with_tensorboard, model_settings)) as sinks:
            show_task("loading the model")
            model, settings, step = run_on_all_ranks(
                world,
                partial(
                    load_run_or_weights,
                    run,
                    config.which,
                    config.eval.weights,
                    config.model,
                    partial(run_on_rank0_with_heartbeat, world),
                ),
            )
            source = {"model": settings.name, "source": config.model.weights} | model_facts(config.model)
            facts = {"checkpoint": Path(config.which).name} if run else source
            results = evaluate(
                model.to(world.device),
                Evaluation(sets, config.eval.batch, *(objective_and_sizes(folder) if run else ())),
                world,
                precision.autocast,
                file=ResultsFile(folder, step, facts | {"precision": config.precision}),
                progress=Progress(),
            )
            if world.is_rank0:
                title = folder.name if step is None else f"{folder.name}, step {step}"
                print_results(results, f"{title}, {config.precision}")
                if config.eval.suite != "none":
                    show(suite_table(config.eval.suite, sets, results, title))
                sinks.write_evaluation(step or 0, results)
    finally:
        destroy_world()
    return results
