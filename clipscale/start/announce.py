"""How a run starts, part 3: announce. Says what the user should know, and opens the log."""

import math
from functools import partial

from clipscale.common.run_folder import CONFIG
from clipscale.common.terminal import log_line
from clipscale.config.train import batch_exceeds_data, beyond_published, changes_since, samples_of
from clipscale.distributed.world import World
from clipscale.log.metrics import MetricLog, open_log
from clipscale.log.records import rate_of_step
from clipscale.log.sinks import log_wandb_mode
from clipscale.robustness.moving_aside import move_outdated_aside, read_or_move_aside
from clipscale.start.build import Components
from clipscale.start.settle import SettledRun
from clipscale.step.optim import Schedule


def announce(settled: SettledRun, components: Components, world: World) -> MetricLog | None:
    """Print what the user should know, and how the start differs from the run so far. Returns the log.

    On rank 0 alone; None on the others.
    """
    if not world.is_rank0:
        return None
    for notice in settled.notices:
        log_line(notice)
    epoch_samples = components.stream.samples_per_epoch
    samples = None if len(settled.stages) > 1 else samples_of(settled.config, epoch_samples)
    for warning in (batch_exceeds_data(settled.config, epoch_samples), beyond_published(settled.config.batch, samples)):
        if warning:
            log_line(f"warning: {warning}", error=True)
    model = components.train_step.model
    if model.is_captioner and not components.train_step.inputs.sort_captions:
        log_line(
            f"captions are computed with the whole context of {model.context_length} tokens: the features of this "
            "captioner's text tower may depend on their padding"
        )
    move_outdated_aside(settled.folder, settled.step, begins_elsewhere=not settled.continues_own_folder)
    log_position(settled, components.schedule)
    sinks = settled.config.log
    log_wandb_mode(sinks.wandb, sinks.wandb_mode)
    log = open_log(
        settled.folder,
        wandb=sinks.wandb_mode,
        tensorboard=sinks.tensorboard,
        every=sinks.every,
        settings=settled.yaml,
        resume_step=settled.step,
        world_size=world.size,
        total=components.schedule.end,
    )
    log_line(components.stream.memory_line)
    return log


def log_position(settled: SettledRun, schedule: Schedule) -> None:
    """Print the run's step, and which settings have changed since the run was there last."""
    step = settled.step
    config = settled.config
    if step:
        changes = changed_settings(settled, schedule)
        changed = ""
        if changes:
            changed = "; changed: " + ", ".join(changes)
        state = ": going on after"
        if step >= schedule.end:
            state = " is complete at"
        log_line(f"run={config.run}{state} step {step} of {schedule.end}{changed}")
    else:
        log_line(f"training {config.model.name}: {schedule.end:,} steps of {config.batch:,} pairs, in {settled.folder}")
    if step >= schedule.end:
        log_line("nothing is left to train; more samples= go on with it")
    elif 0 < schedule.total <= schedule.warmup:
        log_line(
            f"warning: schedule.warmup={config.schedule.warmup} covers all {schedule.total} steps of the run; "
            "give a share, as in schedule.warmup=5%",
            error=True,
        )


def changed_settings(settled: SettledRun, schedule: Schedule) -> list[str]:
    """The settings that differ from those in the run's folder, and the learning rate if it jumps."""
    changes = read_or_move_aside(settled.folder / CONFIG, partial(changes_since, settings=settled.yaml)) or []
    before = rate_of_step(settled.folder, settled.step)
    now = schedule.lr(settled.step - 1)
    if before is not None and settled.step > schedule.first_step and not math.isclose(before, now, rel_tol=0.05):
        changes.append(f"the learning rate of this step {before:.1e} -> {now:.1e}")
    return changes
