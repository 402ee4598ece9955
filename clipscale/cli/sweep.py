"""`clipscale train -m ...`: a run for every combination of values, one after another; `plugins.py` has other ways.

The same command again goes on with a sweep that has a name (`run=NAME`): every run resumes from its newest checkpoint,
and a complete one trains no further.
"""

import os
import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from clipscale.cli import compose, train_verb
from clipscale.common import ranks
from clipscale.common.errors import StoppedError, UserError
from clipscale.common.files import unused_path
from clipscale.common.terminal import announce_task, print_failure, print_line
from clipscale.config.train_config import TrainConfig, to_yaml
from clipscale.launch import local
from clipscale.lifecycle.stopping import exit_on_signal
from clipscale.run_folder.names import checkpoints_of, run_folder


def main(name: str, line: Namespace) -> int:
    """Run the sweep; the exit status is 1 if any run failed.

    All combinations are composed and checked before the first one starts. Raises UserError.
    """
    if name != "train":
        raise UserError(f"{name} takes no -m; give one value for each setting")
    if ranks.under_launcher():
        raise UserError("-m under torchrun would start the whole sweep in every rank; leave torchrun out")
    if any(map(compose.is_hydra_setting, line.words)):
        from clipscale.cli import plugins

        return plugins.main(line)
    runs = runs_of(line.words, line.config_dir)
    folder, configs = runs.folder, runs.configs
    warn_of_metric(configs[0])
    check_runs(configs, line)
    if line.cfg or line.check:
        return 0
    os.environ.setdefault("WANDB_RUN_GROUP", folder.name)  # wandb shows the runs as one group
    failed = []
    for number, config in enumerate(configs, 1):
        name = Path(config.run).name
        print_line(f"run {number} of {len(configs)}: {name}")
        try:
            train_verb.main(config, isolated=True, advice=runs.advice)
        except StoppedError:
            raise
        except (UserError, local.WorkerError) as error:  # does not end the sweep
            print_failure(error, getattr(error, "details", ""))
            failed.append(name)
    return report_end(folder, failed)


def report_end(folder: Path, failed: Sequence[str]) -> int:
    """Say that the sweep has ended, and which runs have `failed`; the exit status."""
    print_line(f"done: {folder}; clipscale report {shlex.quote(str(folder))} compares its runs")
    for name in failed:
        print_line(f"error: failed: {name}", error=True)
    return int(bool(failed))


def check_runs(configs: Sequence[TrainConfig], line: Namespace) -> None:
    """Check the runs, and print or try them where the command line asks for that. Raises UserError."""
    for config in configs:
        if line.cfg:
            print(f"# {config.run}\n{to_yaml(config)}", flush=True)
        train_verb.check_without_torch(config)
        train_verb.check_weights(config, checks_connection=not line.cfg)
    if line.check:
        with exit_on_signal():
            announce_task("loading torch", error=True)
            from clipscale.tools import check_start

            for config in configs:
                check_start.main(config)


def warn_of_metric(config: TrainConfig) -> None:
    """Warn of a `sweep.metric`, which a sweep of all combinations does not use."""
    if config.sweep.metric:
        print_line(
            f"warning: sweep.metric={config.sweep.metric}: only a sweeper such as hydra/sweeper=optuna asks for it",
            error=True,
        )


@dataclass(frozen=True)
class SweepRuns:
    """A sweep's folder and its runs."""

    folder: Path
    configs: list[TrainConfig]
    # Whether the command names the folder. Otherwise the same command begins another sweep.
    has_name: bool

    @property
    def advice(self) -> str:
        """Which command goes on with the sweep after a signal."""
        words = [] if self.has_name else [shlex.quote(f"run={self.folder}")]
        if any(config.resume == "none" for config in self.configs):
            words.append("resume=auto")
        return f"the same command{' with ' if words else ''}{' '.join(words)} resumes it"


def runs_of(words: Sequence[str], config_dir: str | None) -> SweepRuns:
    """The sweep's folder and its runs. Each run has its own folder, and its own address of a copy.

    Raises UserError where two runs would share them.
    """
    by_settings = {repr(config): (differing, config) for differing, config in compose.combinations(words, config_dir)}
    combinations = [*by_settings.values()]  # combinations with equal settings run once
    name_of_sweep = combinations[0][1].run
    folder = folder_of_sweep(name_of_sweep)
    names = [compose.folder_name(differing) for differing, _ in combinations]
    configs = [run_in_sweep(config, folder, name) for name, (_, config) in zip(names, combinations)]
    shared = {name for name in names if names.count(name) > 1}
    if shared:
        raise UserError(f"-m: several runs would share the folder {folder / min(shared)}; give them one by one")
    return SweepRuns(folder, configs, bool(name_of_sweep))


def folder_of_sweep(run: str) -> Path:
    """The folder of a sweep that is called `run`, or has no name."""
    return run_folder(run) if run else unused_path(Path("runs") / f"{datetime.now():sweep-%Y%m%d-%H%M%S}")


def run_in_sweep(config: TrainConfig, folder: Path, name: str) -> TrainConfig:
    """The run, with its own folder in the sweep's, and its own address of a copy.

    If it has begun from `resume=PATH` before, it goes on from its own newest checkpoint.
    """
    copy = config.checkpoint.copy
    if copy:
        copy = f"{copy.rstrip('/')}/{name}"
    run = folder / name
    has_begun = config.resume != "none" and checkpoints_of(run)
    resume = "auto" if has_begun else config.resume
    return replace(config, run=str(run), resume=resume, checkpoint=replace(config.checkpoint, copy=copy))
