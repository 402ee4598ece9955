"""The verb `train`: plans the run, and starts it, unless it is complete."""

import os
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from clipscale.cli.complete_run import print_complete, result_if_complete, result_written
from clipscale.cli.planned import planning
from clipscale.common import files, ranks
from clipscale.common.errors import StoppedError
from clipscale.common.files import unused_path
from clipscale.common.terminal import announce_task, log_line
from clipscale.config.libraries import hidden_packages, needs_transformers, unneeded_packages
from clipscale.config.train_config import MAX_SAMPLES, TrainConfig, default_run_name, with_length
from clipscale.data.loader.fork_server import warm_up
from clipscale.launch import local
from clipscale.run.run_lock import wait_until_free
from clipscale.run.stopping import exit_on_signal
from clipscale.run_folder.paths import RESULT, checkpoint_to_resume, checkpoint_values, run_folder
from clipscale.run_folder.records import RunResult, read_result
from clipscale.tools.data.demo_folder import is_missing

# Ends the line about a signal that comes at a run's start or end.
NOTHING_TO_SAVE = " outside a step: there was nothing to save"


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
    earlier_result = result_written(Path(config.run))
    try:
        return launch_and_plan(config, isolated=isolated)
    except StoppedError as stopped:
        if not advice and result_written(Path(config.run)) not in (None, earlier_result):  # the signal came too late
            return read_result(Path(config.run) / RESULT)
        advice = advice or resume_advice(Path(config.run), same_command_resumes)
        if not advice:
            raise
        raise StoppedError(f"{stopped}; {advice}", stopped.signum) from None


def with_defaults(config: TrainConfig) -> TrainConfig:
    """Fill in the run's folder and length where the settings give none."""
    config = with_length(config)
    folder = run_folder(config.run) if config.run else unused_path(run_folder(default_run_name(config)))
    return replace(config, run=str(folder))


def make_demo_if_missing(config: TrainConfig) -> None:
    """Make the demo's data if the run trains on it and it is not there. Before that, a limit on samples is printed."""
    if MAX_SAMPLES in os.environ:
        log_line(f"{MAX_SAMPLES}={os.environ[MAX_SAMPLES]} is set: this run has {config.samples} samples")
    if is_missing(config.data.train or ()):
        from clipscale.tools.data import demo

        demo.main()


def launch_and_plan(config: TrainConfig, *, isolated: bool) -> RunResult:
    """Wait until the run's folder is free, and start the run. What it needs is imported while it is planned."""
    no_launcher = not ranks.under_launcher()
    workers_fork_here = config.data.workers != 0 and not isolated and config.launch.procs in (None, 1)
    with exit_on_signal(NOTHING_TO_SAVE):
        announce_task("loading torch")
        if workers_fork_here:
            warm_up()  # beside the imports of training
        if no_launcher:
            wait_until_free(Path(config.run))
    plans = config.plan and no_launcher and not resumes_other_batch(config)
    # The server of the workers has open_clip without transformers.
    forked = workers_fork_here and not needs_transformers(config.model.description)
    with planning(config, forked=forked) if plans else nullcontext() as check_plan:
        return launch_training(config, isolated=isolated, check_plan=check_plan)


def launch_training(
    config: TrainConfig, *, isolated: bool = False, check_plan: Callable[[], None] | None = None
) -> RunResult:
    """Train in this process or in workers; see `local.launch`."""
    return local.launch(
        config,
        run_train,
        prepare=import_train,
        check_plan=check_plan,
        isolated=isolated,
        stop_suffix=NOTHING_TO_SAVE,
    )


def import_train(config: TrainConfig) -> None:
    """Import what training needs, while the server of the data workers starts.

    The import does not find slow packages that the model does not need.
    """
    if config.data.workers != 0:
        warm_up()
    unneeded = unneeded_packages(config.model.description, fetches=bool(config.model.weight_settings))
    with hidden_packages(*unneeded):
        import clipscale.train  # noqa: F401


def run_train(config: TrainConfig) -> RunResult:
    """Do one process's part of the run, after `import_train`."""
    from clipscale.train import train

    return train(config)


def resumes_other_batch(config: TrainConfig) -> bool:
    """Whether the checkpoint is of another batch, so that the start is refused whatever its plan says."""
    checkpoint = checkpoint_to_resume(config.run, config.resume, own_first=ranks.is_restarted())
    if config.stages or not checkpoint:
        return False
    try:
        return bool(checkpoint_values(checkpoint)["batch"] != config.batch)
    except files.DAMAGED_OR_FOREIGN:
        return False


def resume_advice(run_dir: Path, same_command: bool) -> str:
    """How a stopped run is resumed; empty if it has no checkpoint. `same_command`: whether the same command does."""
    if not any(run_dir.glob("checkpoints/step_*")):
        return ""
    return (
        "the same command resumes it" if same_command else f"continue with {shlex.quote(f'run={run_dir}')} resume=auto"
    )
