"""`clipscale train -m ...`: a run for every combination of values, one after another, or by plugins of Hydra.

The same command again goes on with a sweep that has a name (`run=NAME`): every run resumes from its newest checkpoint,
and a complete one trains no further.
"""

import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from clipscale.cli.sweep.jobs import FAILURES, Job, Sweep, compose_runs
from clipscale.cli.sweep.plugins import compose_plugins
from clipscale.cli.words import is_hydra_setting, overrides_of
from clipscale.common import ranks
from clipscale.common.errors import StoppedError, UserError
from clipscale.common.terminal import announce_task, print_failure, print_line
from clipscale.config.config_file import to_yaml
from clipscale.run.stopping import exit_on_signal
from clipscale.tools.data.demo_folder import is_missing


def main(name: str, line: Namespace) -> int:
    """Run the sweep; the exit status is 1 if any run failed.

    All runs that are known beforehand are checked before the first one starts. Raises UserError.
    """
    if name != "train":
        raise UserError(f"{name} takes no -m; give one value for each setting")
    if ranks.under_launcher():
        raise UserError("-m under torchrun would start the whole sweep in every rank; leave torchrun out")
    with exit_on_signal(" before a run began; the same command resumes it"):
        sweep, jobs = compose_sweep(line.words, line.config_dir)
        check(sweep, jobs, line)
        if line.cfg or line.check:
            return 0
        if any(is_missing(job.config.data.train or ()) for job in jobs):
            from clipscale.tools.data import demo

            demo.main()  # one job for all: several would make it at the same time
    if sweep.plugins:
        from clipscale.cli.sweep import by_hydra

        failed = by_hydra.train(sweep, sweep.plugins, jobs)
    else:
        failed = train_one_by_one(sweep, jobs)
    print_line(f"done: {sweep.folder}; clipscale report {shlex.quote(str(sweep.folder))} compares its runs")
    for run in failed:
        print_line(f"error: failed: {run}", error=True)
    return int(bool(failed))


def compose_sweep(words: Sequence[str], config_dir: str | None) -> tuple[Sweep, list[Job]]:
    """Compose the settings of Hydra's plugins and of the runs. Raises UserError."""
    hydra_words = [word for word in words if is_hydra_setting(word)]
    plugins = compose_plugins(hydra_words) if hydra_words else None
    _, run_words = overrides_of("train", [word for word in words if word not in hydra_words], sweep=True)
    return compose_runs(run_words, config_dir, plugins)


def check(sweep: Sweep, jobs: Sequence[Job], line: Namespace) -> None:
    """Check the runs, and print or try them where the command line asks for that. Raises UserError."""
    if sweep.metric and not (sweep.plugins and sweep.plugins.has_sweeper):
        print_line(
            f"warning: sweep.metric={sweep.metric}: only a sweeper such as hydra/sweeper=optuna asks for it", error=True
        )
    if line.cfg:
        for job in jobs:
            print(f"# {job.config.run}\n{to_yaml(job.config)}", flush=True)
    if sweep.plugins and sweep.plugins.is_on_slurm:  # the machine of the command line may have no GPU
        jobs = [replace(job, config=replace(job.config, device="auto")) for job in jobs]
    for job in jobs:
        job.check(checks_connection=not line.cfg)
    if line.check:
        with exit_on_signal():
            announce_task("loading torch", error=True)
            from clipscale.tools import check_start

            for job in jobs:
                check_start.main(job.config)


def train_one_by_one(sweep: Sweep, jobs: Sequence[Job]) -> list[str]:
    """Train one run after another; returns the names of those that failed. Raises StoppedError."""
    failed = []
    for number, job in enumerate(jobs, 1):
        print_line(f"run {number} of {len(jobs)}: {job.name}")
        try:
            job.train(sweep.advice)
        except StoppedError:
            raise
        except FAILURES as error:
            print_failure(error, getattr(error, "details", ""))
            failed.append(job.name)
    return failed
