"""How a run starts, part 3: announce. Says what the user should know, and opens the log."""

import math
from functools import partial

from clipscale.common.terminal import log_line
from clipscale.config.train import batch_exceeds_data, beyond_published, changes_since, samples_of
from clipscale.distributed.world import World
from clipscale.log.metrics import MetricLog, open_log
from clipscale.log.records import rate_of_step
from clipscale.log.sinks import log_wandb_mode
from clipscale.own_machine.set_aside import read_or_set_aside, set_outdated_aside
from clipscale.start.build import Parts
from clipscale.start.settle import Start
from clipscale.step.optim import Schedule


def announce(start: Start, parts: Parts, world: World) -> MetricLog | None:
    """Print what the user should know, and how the start differs from the run so far. Returns the log.

    On rank 0 alone; None on the others.
    """
    if not world.is_rank0:
        return None
    for notice in start.notices:
        log_line(notice)
    epoch = parts.stream.samples_per_epoch
    samples = None if len(start.stages) > 1 else samples_of(start.config, epoch)
    for warning in (batch_exceeds_data(start.config, epoch), beyond_published(start.config.batch, samples)):
        if warning:
            log_line(f"warning: {warning}", error=True)
    set_outdated_aside(start.folder, start.step, begins_elsewhere=not start.continues_own_folder)
    log_position(start, parts.schedule)
    sinks = start.config.log
    log_wandb_mode(sinks.wandb, sinks.wandb_mode)
    log = open_log(
        start.folder,
        wandb=sinks.wandb_mode,
        tensorboard=sinks.tensorboard,
        every=sinks.every,
        settings=start.yaml,
        resume_step=start.step,
        world=world.size,
        total=parts.schedule.end,
    )
    log_line(parts.stream.memory)
    return log


def log_position(start: Start, schedule: Schedule) -> None:
    """Print the run's step, and which settings have changed since the run was there last."""
    step = start.step
    config = start.config
    if step:
        changes = changes_of(start, schedule)
        changed = "; changed: " + ", ".join(changes) if changes else ""
        state = " is complete at" if step >= schedule.end else ": going on after"
        log_line(f"run={config.run}{state} step {step} of {schedule.end}{changed}")
    else:
        log_line(f"training {config.model.name}: {schedule.end:,} steps of {config.batch:,} pairs, in {start.folder}")
    if step >= schedule.end:
        log_line("nothing is left to train; more samples= go on with it")
    elif 0 < schedule.total <= schedule.warmup:
        log_line(
            f"warning: schedule.warmup={config.schedule.warmup} covers all {schedule.total} steps of the run; "
            "give a share, as in schedule.warmup=5%",
            error=True,
        )


def changes_of(start: Start, schedule: Schedule) -> list[str]:
    """The settings that differ from those in the run's folder, and the learning rate if it jumps."""
    changes = read_or_set_aside(start.folder / "config.yaml", partial(changes_since, settings=start.yaml)) or []
    before = rate_of_step(start.folder, start.step)
    now = schedule.lr(start.step - 1)
    if before is not None and start.step > schedule.first and not math.isclose(before, now, rel_tol=0.05):
        changes.append(f"the learning rate of this step {before:.1e} -> {now:.1e}")
    return changes
