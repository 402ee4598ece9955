"""What a run is evaluated on, and at which steps it evaluates and saves."""

from clipscale.common.goal import Goal
from clipscale.common.terminal import show_task
from clipscale.config.train_config import TrainConfig
from clipscale.distributed.agreement import run_on_all_ranks
from clipscale.distributed.world import World
from clipscale.eval.run import Evaluation, sized_sets
from clipscale.eval.suites import load_chosen_sets
from clipscale.run.train_loop import Intervals


def load_evaluation(config: TrainConfig, world: World) -> Evaluation:
    """Find what a run is evaluated on, and how. A collective. If one rank finds a mistake, raises UserError on all.

    All stages are evaluated by the last one's objective, so that the results of all steps can be compared. `clipscale
    eval` does the same.
    """
    if config.eval.has_sets:
        show_task("reading the evaluation sets")
    sets = run_on_all_ranks(world, lambda: load_chosen_sets(config.eval))
    labels = [each.label for each in sets]
    sized = [each.label for one in sets for each in sized_sets(one, config.loss.sizes)[1:]]
    for key, goal in (("checkpoint.best", config.checkpoint.best), ("sweep.metric", config.sweep.metric)):
        if goal:
            Goal.parse(key, goal).check_evaluated(key, labels, sized)
    return Evaluation(
        sets=sets,
        batch_size=config.eval.batch,
        objective=config.stage_configs[-1].loss.objective,
        sizes=tuple(config.loss.sizes),
        uses_ema=config.eval.weights == "ema",
        facts={"precision": config.precision},
    )


def intervals_of(config: TrainConfig, evaluation: Evaluation) -> Intervals:
    """When the run evaluates and saves. Weights that it begins with are evaluated before the first step."""
    save_steps, save_seconds = config.checkpoint.interval
    return Intervals(
        evaluates_at_start=bool(config.model.weights and evaluation.sets),
        eval_steps=config.eval.every,
        save_steps=save_steps,
        save_seconds=save_seconds,
    )
