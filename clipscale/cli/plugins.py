"""`clipscale train -m hydra/launcher=NAME hydra/sweeper=NAME ...`: a sweep by plugins of Hydra, through its `main`.

A launcher starts each run as a job: submitit on Slurm, joblib beside other jobs on this machine. A sweeper chooses the
values; Optuna does it by the results of earlier runs. A job is the parent of its run's workers. Folders, locks,
resuming and copies are as in `sweep.py`.
"""

import math
import multiprocessing
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

import hydra
import psutil
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from clipscale.cli import compose, sweep
from clipscale.cli import train as cli_train
from clipscale.cli.job_folder import JobFolder
from clipscale.common import files
from clipscale.common.checkpoints import LOWER_IS_BETTER, Best
from clipscale.common.errors import StoppedError, UserError, one_line, to_user_error
from clipscale.common.hardware import prepare_torch
from clipscale.common.record import Record, RunResult
from clipscale.common.terminal import print_failure, print_line
from clipscale.common.units import did_you_mean, one_of
from clipscale.config.presets import conf_dir
from clipscale.config.train import TrainConfig
from clipscale.launch import local
from clipscale.robustness.output import ignore_output_errors, prepare_output
from clipscale.tools.data import demo

# Hydra's own settings that a sweep takes: these groups, and the keys of the chosen launcher and sweeper.
GROUPS = ("hydra/launcher", "hydra/sweeper", "hydra/sweeper/sampler")
SECTIONS = ("hydra.launcher", "hydra.sweeper")
# Launchers and sweepers of the extra `sweeps`.
EXTRA = ("joblib", "submitit_local", "submitit_slurm", "optuna")
# Signals that joblib's parent passes on. Ctrl-C and a terminal's hangup come to the whole group of processes.
TO_GROUP = (signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class PluginSweep:
    """The command line of a sweep, composed."""

    # Words of Hydra's own settings, and of the runs' settings.
    hydra_words: list[str]
    run_words: list[str]
    # Hydra's own settings.
    hydra: DictConfig
    folder: Path
    # Its runs. A sweeper chooses them later; then only one that it may choose.
    configs: list[TrainConfig]

    @property
    def launcher(self) -> str:
        return self.hydra.runtime.choices["hydra/launcher"]

    @property
    def sweeper(self) -> str:
        return self.hydra.runtime.choices["hydra/sweeper"]

    @property
    def has_sweeper(self) -> bool:
        """Whether a sweeper chooses the values by the results."""
        return self.sweeper != "basic"

    @property
    def is_on_slurm(self) -> bool:
        return self.launcher == "submitit_slurm"

    @property
    def metric(self) -> str:
        return self.configs[0].sweep.metric


def main(line: Namespace) -> int:
    """Run the sweep; the exit status is 1 if any run failed, and 128 + the number of a signal that ended it.

    What can be checked of the runs is checked before the first one starts. Raises UserError.
    """
    swept = compose_sweep(line.words, line.config_dir)
    if not swept.has_sweeper:
        sweep.warn_of_metric(swept.configs[0])
    # the machine of the command line may have no GPU
    checked = [replace(config, device="auto") for config in swept.configs] if swept.is_on_slurm else swept.configs
    sweep.check_runs(checked, line)
    if line.cfg or line.check:
        return 0
    jobs = JobFolder(swept.folder)
    jobs.begin()
    if any(demo.is_missing(config.data.train or ()) for config in swept.configs):
        demo.main()  # once, and not in several jobs at the same time
    if swept.is_on_slurm:
        prepare_slurm(swept.hydra.launcher)
        print_line(f"submitting the runs to Slurm; what they print is in {swept.folder}/.submitit")
    common = frozenset(common_words(swept.run_words))
    job = Job(jobs, common, line.config_dir, os.getpid(), has_sweeper=swept.has_sweeper)
    try:
        launch(job, swept)
    except SystemExit as stopped:  # AfterSignal.LEAVE_SWEEP
        return int(stopped.code or 0)
    except UserError as error:  # Optuna's too: no run has a result
        if isinstance(error, StoppedError) or not jobs.failed():
            raise
        print_failure(error)
        return sweep.report_end(swept.folder, jobs.failed())
    except KeyboardInterrupt:
        if swept.is_on_slurm:
            print_line("the jobs go on without this command: squeue --me lists them, scancel ends them", error=True)
        raise
    results = swept.folder / "optimization_results.yaml"
    if swept.sweeper == "optuna" and results.is_file():
        print_best(files.read_record(results), swept.metric)
    return sweep.report_end(swept.folder, jobs.failed())


def compose_sweep(words: Sequence[str], config_dir: str | None) -> PluginSweep:
    """Compose the settings of Hydra, of its plugins and of the runs. Raises UserError."""
    hydra_words = [word for word in words if compose.is_hydra_setting(word)]
    chosen = hydra_settings(hydra_words)
    check_one_task(chosen.runtime.choices["hydra/launcher"], chosen.launcher)
    _, run_words = compose.overrides("train", [word for word in words if word not in hydra_words], sweep=True)
    all_known = chosen.runtime.choices["hydra/sweeper"] == "basic"
    find_runs = sweep.runs_of if all_known else first_run
    folder, configs = find_runs(run_words, config_dir)
    return PluginSweep(hydra_words, run_words, chosen, folder, configs)


def key_of(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def hydra_settings(words: Sequence[str]) -> DictConfig:
    """Hydra's own settings with the words, composed. Raises UserError for what it or the plugins do not know."""
    for word in words:
        key = key_of(word)
        if key not in GROUPS and not key.startswith(tuple(f"{section}." for section in SECTIONS)):
            raise UserError(
                f"{word}: of Hydra's settings a sweep takes {one_of(GROUPS)}, and the keys of the chosen ones, as in "
                "hydra.launcher.partition=gpu; the sweep's folder is run=NAME"
            )
    groups = [word for word in words if key_of(word) in GROUPS]
    chosen = compose_hydra(groups)
    for word in words:
        key = key_of(word)
        section = ".".join(key.split(".")[:2])
        if word.startswith("+") or key in GROUPS:
            continue
        allowed = [f"{section}.{name}" for name in OmegaConf.select(chosen, section.removeprefix("hydra."))]
        if ".".join(key.split(".")[:3]) not in allowed:
            group = section.replace(".", "/")
            choice = chosen.runtime.choices[group]
            raise UserError(f"{word}: {group}={choice} has no such setting{did_you_mean(key, allowed)}")
    return compose_hydra(words)


def compose_hydra(words: Sequence[str]) -> DictConfig:
    """Hydra's own settings. Raises UserError for a package that is not installed."""
    try:
        return compose.compose_config("train", words, with_own=True).hydra
    except compose.HYDRA_ERRORS as error:
        for word in words:
            is_plugin = key_of(word) in GROUPS[:2] and word.partition("=")[2] in EXTRA
            if is_plugin and "Could not find" in str(error):
                raise UserError(f"{word}: its package is not installed; pip install 'clipscale[sweeps]'") from error
        raise compose.one_line_error(error) from error


def check_one_task(name: str, launcher: DictConfig) -> None:
    """Raise UserError for jobs of several tasks, which would all train the same run."""
    for key in ("nodes", "tasks_per_node"):
        if launcher.get(key, 1) != 1:
            raise UserError(
                f"hydra.launcher.{key}={launcher[key]}: a job of a sweep is one task on one node, and starts a process "
                "for each of its GPUs; a run on several nodes is a Slurm job of its own"
            )
    if name == "joblib" and launcher.get("backend") not in (None, "loky"):
        raise UserError(f"hydra.launcher.backend={launcher.backend}: runs need processes of their own; leave it out")


def parse(words: Sequence[str]) -> list[Override]:
    """Words as Hydra reads them. Raises UserError."""
    try:
        return OverridesParser.create().parse_overrides(list(words))
    except HydraException as error:
        raise compose.one_line_error(error) from error


def common_words(words: Sequence[str]) -> list[str]:
    """The words with one value, which all runs of a sweep have, as Hydra gives them to a job."""
    return [
        f"{override.get_key_element()}={override.get_value_element_as_str()}"
        for override in parse(words)
        if not override.is_sweep_override()
    ]


def first_run(words: Sequence[str], config_dir: str | None) -> tuple[Path, list[TrainConfig]]:
    """The sweep's folder, and the run with the first of each key's values. Raises UserError."""
    chosen = common_words(words)
    for override in parse(words):
        if override.is_interval_sweep():
            interval: Any = override.value()
            chosen.append(f"{override.get_key_element()}={interval.start}")
        elif override.is_sweep_override():
            chosen.append(f"{override.get_key_element()}={next(override.sweep_string_iterator())}")
    config = compose.settings("train", chosen, config_dir)
    folder = sweep.folder_of_sweep(config.run)
    return folder, [sweep.run_in_sweep(config, folder, "first")]


def default_words(swept: PluginSweep) -> list[str]:
    """Words with values that suit runs, for keys that the launcher and the sweeper have and nobody has typed."""
    low = not swept.metric or swept.metric.rpartition("/")[2] in LOWER_IS_BETTER
    suitable = {
        # as often as its time limit ends it: a requeued run goes on where it was
        "hydra.launcher.max_num_timeout": 1000,
        "hydra.sweeper.direction": "minimize" if low else "maximize",
        # a run that fails ends nothing but itself
        "hydra.sweeper.max_failure_rate": 1.0,
        # the same command again proposes the same values: those runs are complete
        "hydra.sweeper.sampler.seed": 0,
    }
    typed = {key_of(word) for word in swept.hydra_words}
    words = []
    for key, value in suitable.items():
        section, _, name = key.removeprefix("hydra.").rpartition(".")
        if key not in typed and name in (OmegaConf.select(swept.hydra, section) or {}):
            words.append(f"{key}={value}")
    return words


def prepare_slurm(launcher: DictConfig) -> None:
    """Set environment variables that submitit and Slurm read, here and in the jobs.

    Before its time limit a run then gets SIGTERM, on which it saves, and not SIGUSR2. And srun gets --cpus-per-task,
    which it does not take over since Slurm 22.05: a run and all its loaders would share one core.
    """
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "TERM"
    if launcher.cpus_per_task:
        os.environ["SRUN_CPUS_PER_TASK"] = str(launcher.cpus_per_task)


def launch(job: "Job", swept: PluginSweep) -> None:
    """Start the jobs by Hydra's main. Raises UserError for what a plugin raises, and StoppedError."""
    typed = sys.argv
    sys.argv = ["clipscale", "--multirun", *hydra_command_line(job, swept)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that it raises an error, and does not print it
    signals = passing_signals_on(job.jobs) if swept.launcher == "joblib" else nullcontext()
    try:
        with to_user_error(f"hydra/launcher={swept.launcher} hydra/sweeper={swept.sweeper}"), signals:
            hydra.main(config_path=str(conf_dir()), config_name="train", version_base=compose.VERSION)(job)()
    finally:
        sys.argv = typed


def hydra_command_line(job: "Job", swept: PluginSweep) -> list[str]:
    """The words of the sweep as Hydra's main takes them."""
    words = [*swept.hydra_words, *default_words(swept), *swept.run_words]
    declared = [f"++{word}" if compose.is_in_dictionary(key_of(word), TrainConfig) else word for word in words]
    own = [
        f"hydra.sweep.dir={compose.quote(str(swept.folder))}", "hydra.sweep.subdir=.", "hydra.output_subdir=null",
        "hydra.job.name=clipscale", "hydra/job_logging=none", "hydra/hydra_logging=none",
    ]  # fmt: skip
    if job.config_dir:
        own.append(f"hydra.searchpath=[file://{Path(job.config_dir).resolve()}]")
    return [*declared, *own]


def print_best(results: Record, metric: str) -> None:
    """Print what Optuna has found."""
    values = " ".join(f"{key}={value}" for key, value in results["best_params"].items())
    print_line(f"best: {values} ({metric or 'loss'} {results['best_value']:.4f})")


def objective(result: RunResult, metric: str) -> float:
    """What the sweeper gets of a run: the result that `sweep.metric` names, or without one the last loss.

    Names are as in `checkpoint.best`. Raises UserError.
    """
    label = Best(Path(), metric).label(result["eval"])
    metrics = result["eval"][label] if metric and label else {"loss": result["loss"]}
    key = metric.rpartition("/")[2] or "loss"
    if key not in metrics or (metric and label is None):
        measured = [f"{label}/{name}" for label, metrics in result["eval"].items() for name in metrics]
        raise UserError(f"sweep.metric={metric}: the run has {one_of(measured)}; the same command with one of them")
    if not math.isfinite(metrics[key]):
        raise UserError(f"sweep.metric={metric}: it is {metrics[key]} after the run; the sweeper cannot use that")
    return metrics[key]


class AfterSignal(Enum):
    """What a job does after a signal has ended its run."""

    # The run was in the process of the command line: that leaves the sweep.
    LEAVE_SWEEP = auto()
    # On Slurm: put the job back into the queue, as `launch/slurm.sh` does.
    REQUEUE = auto()
    # Count the run as failed, and go on with the sweep.
    COUNT_AS_FAILED = auto()


def after_signal(number: int, *, in_parent: bool) -> AfterSignal:
    """`in_parent`: the run was in the process of the command line."""
    if in_parent:
        return AfterSignal.LEAVE_SWEEP
    if "SUBMITIT_EXECUTOR" in os.environ and number == signal.SIGTERM:
        return AfterSignal.REQUEUE
    return AfterSignal.COUNT_AS_FAILED


@dataclass(frozen=True)
class Job:
    """What a launcher calls for each run, perhaps in another process or on another machine, where it is unpickled."""

    jobs: JobFolder
    # The words that all runs share, so that the others name a run's folder.
    common: frozenset[str]
    config_dir: str | None
    # The process of the command line.
    parent: int
    # Whether a sweeper gets the result, or the failure.
    has_sweeper: bool

    def __call__(self, _: DictConfig) -> float | None:
        """Train the run, and return its result; None without one. For a sweeper, raises UserError and WorkerError."""
        in_parent = os.getpid() == self.parent
        if not in_parent:
            multiprocessing.set_start_method(None, force=True)  # not joblib's own, which a run's processes do not know
            prepare_output()
            prepare_torch()
            ignore_output_errors()
        os.environ.setdefault("WANDB_RUN_GROUP", self.jobs.sweep.name)  # wandb shows the runs as one group
        job = HydraConfig.get()
        words = [word.lstrip("+") for word in job.overrides.task]
        GlobalHydra.instance().clear()  # it has composed the job
        name = sweep.folder_name([word for word in words if word not in self.common])
        with self.jobs.lock(name):
            if self.jobs.is_stopping:
                return None
            print_line(f"run {job.job.num + 1}: {name}")
            try:
                return self.train(words, name)
            except StoppedError as stopped:
                then = after_signal(stopped.number, in_parent=in_parent)
                if then is AfterSignal.LEAVE_SWEEP:
                    print_line(stopped, error=True)
                    raise SystemExit(128 + stopped.number) from stopped
                if then is AfterSignal.REQUEUE:
                    print_line(stopped, error=True)
                    signal.raise_signal(signal.SIGTERM)  # submitit requeues the job, and ends this process
                self.report_failure(name, stopped)
            except (UserError, OSError, local.WorkerError) as error:
                self.report_failure(name, error)
        return None

    def train(self, words: Sequence[str], name: str) -> float:
        """Check and train the run; the result for the sweeper."""
        config = sweep.run_in_sweep(compose.settings("train", words, self.config_dir), self.jobs.sweep, name)
        cli_train.check(config)
        cli_train.check_weights(config)
        return objective(cli_train.main(config, isolated=True), config.sweep.metric)

    def report_failure(self, name: str, error: Exception) -> None:
        """Print why the run has failed, and note it; for a sweeper, raise it again."""
        print_failure(error, getattr(error, "details", ""))
        self.jobs.note_failure(name, one_line(error))
        if self.has_sweeper:
            raise error


@contextmanager
def passing_signals_on(jobs: JobFolder) -> Iterator[None]:
    """Around joblib's work: at the first signal all runs save, and then StoppedError is raised.

    joblib itself kills its processes when this one is interrupted. Other launchers run jobs in this process, or in
    no child of it.
    """

    def stop(number: int, _: object) -> None:
        if jobs.is_stopping:
            raise KeyboardInterrupt
        jobs.stop()
        if number not in TO_GROUP:
            for child in psutil.Process().children():
                child.send_signal(number)
        jobs.wait_for_jobs()
        raise StoppedError("stopped: the same command goes on", number)

    numbers = (*TO_GROUP, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, stop) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
