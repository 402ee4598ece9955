"""The verb `train`: checks the settings and what lies on this machine, plans the run, and starts it."""

import os
import shlex
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

from clipscale.cli.planned import planning
from clipscale.common import files, ranks
from clipscale.common.errors import StoppedError, UserError
from clipscale.common.files import check_writable, unused_path
from clipscale.common.record import RunResult
from clipscale.common.terminal import announce_task, is_main_rank, log_line, log_warning
from clipscale.common.text import did_you_mean
from clipscale.config.eval import AnyModel
from clipscale.config.libraries import needs_transformers
from clipscale.config.parse import ALIASES
from clipscale.config.stages import stage_configs_of
from clipscale.config.train_config import (
    MAX_SAMPLES,
    TrainConfig,
    changed_settings,
    default_run_name,
    samples_of,
    to_yaml,
    with_length,
)
from clipscale.data.loader.fork_server import warm_up
from clipscale.eval.places import check_places
from clipscale.launch import local
from clipscale.lifecycle.stopping import exit_on_signal
from clipscale.run_folder.paths import (
    RESULT,
    check_own,
    checkpoint_to_resume,
    described_values,
    path_of,
    path_or_run,
    run_folder,
    run_to_resume,
)
from clipscale.run_folder.records import read_result, written_settings
from clipscale.tools.data.demo_folder import evaluation_sets, is_missing, user_folder

# A complete run stays complete if only these settings, or settings of these sections, differ. They change its weights
# by rounding at most. One exception is accepted: with dropout, the chunks (`cache.`) decide which sample gets which
# random numbers.
NOT_TRAINED = ("plan", "offload", "data.workers", "data.timeout_s")
NOT_TRAINED_SECTIONS = ("log.", "checkpoint.", "launch.", "sweep.", "cache.")
# Values of `resume` that are not paths.
RESUMES = ("auto", "none")
# A start whose first shard has no usable sample looks for one in the others, if an epoch has at most this many samples.
MAX_SEARCHED = 50_000


def check_without_torch(config: TrainConfig) -> None:
    """Make every check that needs no torch, also of local shards. Raises UserError, prints warnings.

    Writes nothing.
    """
    local.check_train(config)
    check_resume(config.resume)
    if config.run and is_main_rank():
        check_own(run_folder(config.run))
        check_writable(run_folder(config.run))
    if ranks.under_launcher():  # there all ranks find missing shards together
        return
    missing = is_missing(config.data.train or ())
    check_places(config.eval, rendered=evaluation_sets(user_folder()) if missing else ())
    if missing:
        return
    from clipscale.config.conditions import source_names
    from clipscale.data.shards.counts import count_if_quick
    from clipscale.data.shards.listing import local_shards
    from clipscale.data.shards.unusable import lost_pairs, why_unusable

    shards = local_shards(config.data)
    epoch_samples = count_if_quick(config.data, shards)
    if shards and epoch_samples is not None:
        captions = source_names(config.data.captions)
        if holds := why_unusable(shards[0], captions):
            if epoch_samples <= MAX_SEARCHED and all(why_unusable(url, captions, most=None) for url in shards):
                raise UserError(f"data.train: no sample is usable: {holds}")
            log_warning(f"data.train: {holds}", error=True)
        elif lost := lost_pairs(shards[0], captions):
            log_warning(f"data.train: {lost}", error=True)
        for stage_config in stage_configs_of(config):
            samples_of(stage_config, epoch_samples)


def check_resume(resume: str) -> None:
    """Raise UserError for a `resume` that is neither one of its words, nor a path or a run that is there."""
    if resume not in RESUMES and not path_or_run(resume).exists():
        meant = ALIASES.get(f"resume={resume}", resume)
        raise UserError(f"resume={resume}: there is no such file or run folder{did_you_mean(meant, RESUMES)}")


def has_checkpoint(config: TrainConfig) -> bool:
    """Whether the run has a checkpoint."""
    return bool(config.run) and any(run_folder(config.run).glob("checkpoints/step_*"))


def check_weights(config: TrainConfig | AnyModel, *, checks_connection: bool = True) -> None:
    """Raise UserError for tags of another model. `checks_connection`: also for weights that cannot be fetched.

    May ask a server, so it comes after the other checks.
    """
    from clipscale.models.weights.hub import check_connection
    from clipscale.models.weights.sources import check_tags

    if isinstance(config, TrainConfig) and run_to_resume(config.run, config.resume):
        return  # the checkpoint holds all weights
    check_tags(config.model)
    if checks_connection and not ranks.under_launcher():
        check_connection(config.model)


def result_if_complete(config: TrainConfig) -> RunResult | None:
    """The run's result, from its folder, if it is complete with these settings; otherwise None.

    Also None if a file is damaged, which the start then moves aside.
    """
    folder = Path(config.run)
    if config.resume != "auto" or not (folder / RESULT).is_file():
        return None
    try:
        result = read_result(folder / RESULT)
        trained = written_settings(folder)
    except files.DAMAGED:
        return None
    differing = changed_settings(trained, to_yaml(config))
    changed = any(starts_again(key, typed) for key, (_, typed) in differing.items())
    return result if path_of(folder, result["step"]).is_dir() and not changed else None


def result_written(folder: str) -> int | None:
    """When a run's result was written, in nanoseconds; None if the run is not complete."""
    file = Path(folder) / RESULT
    return file.stat().st_mtime_ns if file.is_file() else None


def starts_again(key: str, typed: object) -> bool:
    """Whether a complete run starts again for a setting that differs from those it was trained with.

    A model's setting without a value is no difference: the weights have filled it in. A new `checkpoint.copy` is one:
    the copy has yet to be made.
    """
    if key.startswith("model."):
        return typed not in (None, "", {})
    if key == "checkpoint.copy":
        return bool(typed)
    return key not in NOT_TRAINED and not key.startswith(NOT_TRAINED_SECTIONS)


def with_defaults(config: TrainConfig) -> TrainConfig:
    """Fill in the run's folder and length where the settings give none."""
    config = with_length(config)
    folder = run_folder(config.run) if config.run else unused_path(run_folder(default_run_name(config)))
    return replace(config, run=str(folder))


def resumes_other_batch(config: TrainConfig) -> bool:
    """Whether the checkpoint is of another batch, so that the start is refused whatever its plan says."""
    checkpoint = checkpoint_to_resume(config.run, config.resume, own_first=ranks.is_restarted())
    if config.stages or not checkpoint:
        return False
    try:
        return bool(described_values(checkpoint)["batch"] != config.batch)
    except files.DAMAGED_OR_FOREIGN:
        return False


def main(config: TrainConfig, *, isolated: bool = False, advice: str = "") -> RunResult:
    """Start the run, and meanwhile print whether it fits this machine. torchrun's workers start without a plan.

    `isolated`: the run gets processes of its own, even if one suffices. `advice`: for a run of a sweep, the command
    that resumes the sweep after a signal; else empty. Raises as `launch.local.launch`, and UserError for a run that
    cannot fit.
    """
    same_command_resumes = bool(config.run) and config.resume == "auto"
    config = with_defaults(config)
    if not ranks.under_launcher():
        make_demo_if_missing(config)
        result = result_if_complete(config)
        if result:
            print_complete(config, result)
            return result
    earlier_result = result_written(config.run)
    try:
        return launch_and_plan(config, isolated=isolated)
    except StoppedError as stopped:
        if not advice and result_written(config.run) not in (None, earlier_result):  # the signal came too late
            return read_result(Path(config.run) / RESULT)
        if not advice and has_checkpoint(config):
            own = f"continue with {shlex.quote(f'run={config.run}')} resume=auto"
            advice = "the same command resumes it" if same_command_resumes else own
        if not advice:
            raise
        raise StoppedError(f"{stopped}; {advice}", stopped.signum) from None


def make_demo_if_missing(config: TrainConfig) -> None:
    """Make the demo's data if the run trains on it and it is not there. Before that, a limit on samples is printed."""
    if MAX_SAMPLES in os.environ:
        log_line(f"{MAX_SAMPLES}={os.environ[MAX_SAMPLES]} is set: this run has {config.samples} samples")
    if is_missing(config.data.train or ()):
        from clipscale.tools.data import demo

        demo.main()


def print_complete(config: TrainConfig, result: RunResult) -> None:
    """Print the result of a run that is complete."""
    from clipscale.log.table import print_results

    step = result["step"]
    log_line(
        f"run={config.run} is complete at step {step}: nothing is left to train; give more samples= to train further"
    )
    print_results(result["eval"], f"{Path(config.run).name}, step {step}")


def launch_and_plan(config: TrainConfig, *, isolated: bool) -> RunResult:
    """Wait until the run's folder is free, and start the run. What it needs is imported while it is planned."""
    no_launcher = not ranks.under_launcher()
    workers_fork_here = config.data.workers != 0 and not isolated and config.launch.procs in (None, 1)
    with exit_on_signal(local.NOTHING_TO_SAVE):
        announce_task("loading torch")
        if workers_fork_here:
            warm_up()  # beside the imports of training
    plans = config.plan and no_launcher and not resumes_other_batch(config)
    # The server of the workers has open_clip without transformers.
    forked = workers_fork_here and not needs_transformers(config.model.description)
    with planning(config, forked=forked) if plans else nullcontext() as check_plan:
        with exit_on_signal(local.NOTHING_TO_SAVE):
            from clipscale.lifecycle.run_lock import wait_until_free

            if no_launcher:
                wait_until_free(Path(config.run))
        return cast(RunResult, local.launch(config, isolated=isolated, check_plan=check_plan))
