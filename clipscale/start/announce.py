"""Prints what the user should know of a run that starts. Changes nothing."""

import math

from clipscale.common.terminal import log_line, log_warning
from clipscale.config.advice import batch_exceeds_data_warning, oversized_batch_warning
from clipscale.config.config_file import change_lines
from clipscale.config.train_config import samples_of
from clipscale.log.sinks import log_wandb_mode
from clipscale.run_folder.records import lr_of_step, written_settings
from clipscale.start.build import BuiltRun
from clipscale.start.resolve import ResolvedRun
from clipscale.step.optim import Schedule


def announce(resolved: ResolvedRun, built: BuiltRun) -> None:
    """Print what the user should know, and how the start differs from the run so far.

    Call it before `open_run_log`: that replaces config.yaml, with which this compares.
    """
    for notice in resolved.notices:
        log_line(notice)
    epoch_samples = built.stream.epoch_samples
    samples = None if len(resolved.stages) > 1 else samples_of(resolved.config, epoch_samples)
    for warning in (
        batch_exceeds_data_warning(resolved.config, epoch_samples),
        oversized_batch_warning(resolved.config.batch, samples),
    ):
        if warning:
            log_warning(warning, error=True)
    model = built.train_step.model
    if model.is_captioner and not built.train_step.passes.sorts_captions:
        log_line(
            f"captions are computed with the whole context of {model.context_length} tokens: the features of this "
            "captioner's text tower may depend on their padding"
        )
    log_position(resolved, built.schedule)
    log_wandb_mode(resolved.config.log.wandb, resolved.config.log.wandb_mode)
    log_line(built.stream.memory_line)


def log_position(resolved: ResolvedRun, schedule: Schedule) -> None:
    """Print the run's step, and which settings have changed since the run was there last."""
    step = resolved.step
    config = resolved.config
    if step:
        changes = changes_at_resume(resolved, schedule)
        changed = ""
        if changes:
            changed = "; changed: " + ", ".join(changes)
        state = ": its next stage begins after" if resolved.is_stage_start else ": resumed after"
        if step >= schedule.end:
            state = " is complete at"
        log_line(f"run={config.run}{state} step {step} of {schedule.end}{changed}")
    else:
        log_line(
            f"training {config.model.name}: {schedule.end:,} steps of {config.batch:,} pairs, in {resolved.run_dir}"
        )
    if step >= schedule.end:
        log_line("nothing is left to train; give more samples= to train further")
    elif 0 < schedule.total <= schedule.warmup:
        log_warning(
            f"schedule.warmup={config.schedule.warmup} covers all {schedule.total} steps of the run; "
            "give a share, as in schedule.warmup=5%",
            error=True,
        )


def changes_at_resume(resolved: ResolvedRun, schedule: Schedule) -> list[str]:
    """The settings that differ from those in the run's folder, and the learning rate if it jumps."""
    changes = change_lines(written_settings(resolved.run_dir), resolved.config_yaml)
    before = lr_of_step(resolved.run_dir, resolved.step)
    now = schedule.lr(resolved.step)
    if before is not None and resolved.step > schedule.steps_before and not math.isclose(before, now, rel_tol=0.05):
        changes.append(f"the learning rate of this step {before:.1e} -> {now:.1e}")
    return changes
