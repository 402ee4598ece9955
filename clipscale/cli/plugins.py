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

import hydra
import psutil
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from clipscale.cli import compose, sweep, train_verb
from clipscale.cli.job_folder import JobFolder
from clipscale.cli.plugin_settings import PluginSweep, common_words, compose_sweep, default_words, key_of
from clipscale.common import files
from clipscale.common.errors import StoppedError, UserError, one_line, to_user_error
from clipscale.common.goal import Goal
from clipscale.common.hardware import prepare_torch
from clipscale.common.output import ignore_output_errors, prepare_output
from clipscale.common.record import Record, RunResult
from clipscale.common.signals import SIGNALS
from clipscale.common.terminal import RUN_LABEL, print_failure, print_line
from clipscale.common.text import counted, one_of
from clipscale.config.presets import conf_dir
from clipscale.config.train_config import TrainConfig
from clipscale.launch import local
from clipscale.lifecycle.stopping import exit_on_signal, stop_message
from clipscale.run_folder.names import RESULT
from clipscale.tools.data.demo_folder import is_missing

# Signals that come to the whole group of processes; the others are passed on to the children.
TO_GROUP = (signal.SIGINT, signal.SIGHUP)


def main(line: Namespace) -> int:
    """Run the sweep; the exit status is 1 if any run failed, and 128 + the number of a signal that ended it.

    The runs are checked, as far as possible, before the first one starts. Raises UserError.
    """
    with exit_on_signal(" before a run began; the same command resumes it"):
        swept = prepare_sweep(line)
    if not swept:
        return 0
    jobs = JobFolder(swept.runs.folder)
    jobs.begin()
    if swept.is_on_slurm:
        prepare_slurm(swept.hydra.launcher)
        print_line(f"submitting the runs to Slurm; what they print is in {swept.runs.folder}/.submitit")
    if swept.has_sweeper:
        common = frozenset(common_words(swept.run_words))
    else:
        common = frozenset(compose.words_of_all_runs(compose.choices_of(swept.run_words)))
    job = Job(
        jobs,
        common,
        line.config_dir,
        swept.runs.advice,
        parent=os.getpid(),
        has_sweeper=swept.has_sweeper,
        shares_output=swept.launcher == "joblib",
    )
    try:
        launch(job, swept)
    except SystemExit as stopped:  # AfterSignal.LEAVE_SWEEP
        return int(stopped.code or 0)
    except UserError as error:  # Optuna's too: no run has a result
        if isinstance(error, StoppedError) or not jobs.failed():
            raise
        print_failure(error)
        return sweep.report_end(swept.runs.folder, jobs.failed())
    except KeyboardInterrupt:
        if swept.is_on_slurm:
            print_line("the jobs continue without this command: squeue --me lists them, scancel ends them", error=True)
        raise
    results = swept.runs.folder / "optimization_results.yaml"
    if swept.sweeper == "optuna" and results.is_file():
        print_best(files.read_record(results), swept.metric)
    return sweep.report_end(swept.runs.folder, jobs.failed())


def prepare_sweep(line: Namespace) -> PluginSweep | None:
    """Compose and check the sweep, and render its data. Returns None if nothing is to start. Raises UserError."""
    swept = compose_sweep(line.words, line.config_dir)
    if not swept.has_sweeper:
        sweep.warn_of_metric(swept.runs.configs[0])
    checked = swept.runs.configs
    if swept.is_on_slurm:  # the machine of the command line may have no GPU
        checked = [replace(config, device="auto") for config in checked]
    sweep.check_runs(checked, line)
    if line.cfg or line.check:
        return None
    if any(is_missing(config.data.train or ()) for config in swept.runs.configs):
        from clipscale.tools.data import demo

        demo.main()  # once, and not in several jobs at the same time
    return swept


def prepare_slurm(launcher: DictConfig) -> None:
    """Set environment variables that submitit and Slurm read, here and in the jobs.

    Before its time limit a run then gets SIGTERM, at which it saves, instead of SIGUSR2. And srun gets --cpus-per-task.
    Since Slurm 22.05 it does not take that over itself: a run and all its loaders would share one core.
    """
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "TERM"
    if launcher.cpus_per_task:
        os.environ["SRUN_CPUS_PER_TASK"] = str(launcher.cpus_per_task)


def launch(job: "Job", swept: PluginSweep) -> None:
    """Start the jobs by Hydra's main. Raises UserError for what a plugin raises, and StoppedError."""
    typed = sys.argv
    sys.argv = ["clipscale", "--multirun", *hydra_command_line(job, swept)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that it raises an error, and does not print it
    signals = passing_signals_on(job.jobs, swept) if swept.launcher == "joblib" else nullcontext()
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
        f"hydra.sweep.dir={compose.quote(str(swept.runs.folder))}", "hydra.sweep.subdir=.", "hydra.output_subdir=null",
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
    """The number that the sweeper optimizes: the run's result that `sweep.metric` names, or without one its last loss.

    Names are as in `checkpoint.best`. Raises UserError.
    """
    if not metric:
        value: float | None = result["loss"]
    else:
        goal = Goal.parse("sweep.metric", metric)
        label = goal.likeliest_set(result["eval"])
        value = result["eval"][label].get(goal.metric) if label else None
    if value is None:
        measured = [f"{label}/{name}" for label, metrics in result["eval"].items() for name in metrics]
        raise UserError(f"sweep.metric={metric}: the run has {one_of(measured)}; the same command with one of them")
    if not math.isfinite(value):
        raise UserError(f"sweep.metric={metric}: it is {value} after the run; the sweeper cannot use that")
    return value


class AfterSignal(Enum):
    """The action of a job after a signal has ended its run."""

    # Leave the sweep: the run was in the process of the command line.
    LEAVE_SWEEP = auto()
    # Put the job back into Slurm's queue, as `launch/slurm.sh` does.
    REQUEUE = auto()
    # Count the run as failed, and go on with the sweep.
    COUNT_AS_FAILED = auto()


def after_signal(number: int, *, in_parent: bool) -> AfterSignal:
    """Choose the action. `in_parent`: whether the run was in the process of the command line."""
    if in_parent:
        return AfterSignal.LEAVE_SWEEP
    if "SUBMITIT_EXECUTOR" in os.environ and number == signal.SIGTERM:
        return AfterSignal.REQUEUE
    return AfterSignal.COUNT_AS_FAILED


@dataclass(frozen=True)
class Job:
    """The function that a launcher calls for each run. It may be unpickled in another process, on another machine."""

    jobs: JobFolder
    # The words that all runs share. The other words name a run's folder.
    common: frozenset[str]
    config_dir: str | None
    # Which command goes on after a signal.
    advice: str
    # The process of the command line.
    parent: int
    # Whether a sweeper gets the result, or the failure.
    has_sweeper: bool
    # Whether runs that go on at the same time print on one terminal.
    shares_output: bool

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
        name = compose.folder_name([word for word in words if word not in self.common])
        with self.jobs.lock(name):
            if self.jobs.is_stopping:
                return None
            print_line(f"run {job.job.num + 1}: {name}")
            if self.shares_output and not in_parent:
                os.environ[RUN_LABEL] = name  # a run's workers have it too
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
        config = sweep.run_in_sweep(
            compose.settings("train", words, self.config_dir, in_sweep=name), self.jobs.sweep, name
        )
        train_verb.check_without_torch(config)
        train_verb.check_weights(config)
        return objective(train_verb.main(config, isolated=True, advice=self.advice), config.sweep.metric)

    def report_failure(self, name: str, error: Exception) -> None:
        """Print why the run has failed, and note it; for a sweeper, raise it again."""
        print_failure(error, getattr(error, "details", ""))
        self.jobs.note_failure(name, one_line(error))
        if self.has_sweeper:
            raise error


@contextmanager
def passing_signals_on(jobs: JobFolder, swept: PluginSweep) -> Iterator[None]:
    """Around joblib's work: at the first signal all runs save, and then StoppedError is raised.

    joblib itself kills its processes when this process is interrupted. Other launchers run jobs in this process, or not
    in its children.
    """
    first: StoppedError | None = None

    def stop(number: int, _: object) -> None:
        nonlocal first
        if first:
            raise KeyboardInterrupt
        first = StoppedError("", number)
        jobs.stop()
        if number not in TO_GROUP:
            for child in psutil.Process().children():
                child.send_signal(number)
        jobs.wait_for_jobs()
        first = StoppedError(f"{stop_message(number)}; {what_remains(swept)}", number)
        raise first

    before = {number: signal.signal(number, stop) for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
        if first:  # an import has swallowed the interrupt
            raise first
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def what_remains(swept: PluginSweep) -> str:
    """The end of the line about a sweep that a signal has ended."""
    if swept.has_sweeper:  # its runs are not known beforehand
        return swept.runs.advice
    complete = sum((Path(config.run) / RESULT).is_file() for config in swept.runs.configs)
    return f"{complete} of {counted(len(swept.runs.configs), 'run')} complete; {swept.runs.advice}"
