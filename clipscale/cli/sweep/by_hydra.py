"""`clipscale train -m hydra/launcher=NAME hydra/sweeper=NAME ...`: a sweep by plugins of Hydra, through its `main`.

A launcher starts each run as a job: submitit on Slurm, joblib beside other jobs on this machine. A sweeper chooses the
values; Optuna does it by the results of earlier runs. A job is the parent of its run's workers.
"""

import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import hydra
import psutil
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from clipscale.cli.compose import HYDRA_VERSION, compose_settings, is_in_dictionary
from clipscale.cli.sweep.job_folder import JobFolder
from clipscale.cli.sweep.jobs import FAILURES, Job, Sweep, folder_name
from clipscale.cli.sweep.plugins import Plugins, key_of
from clipscale.cli.words import quote
from clipscale.common import files
from clipscale.common.errors import StoppedError, UserError, one_line, to_user_error
from clipscale.common.goal import Goal
from clipscale.common.output import ignore_output_errors, prepare_output
from clipscale.common.terminal import RUN_LABEL, print_failure, print_line
from clipscale.common.text import counted, one_of
from clipscale.config.presets import conf_dir
from clipscale.config.train_config import TrainConfig
from clipscale.run.stopping import SAME_CTRL_C_S, effective_signal, handling_signals, stop_message
from clipscale.run_folder.paths import RESULT
from clipscale.run_folder.records import RunResult

# Signals that come to the whole group of processes; the others are passed on to the children.
TO_GROUP = (signal.SIGINT, signal.SIGHUP)


class LeaveSweepError(BaseException):
    """A signal has ended a run in the process of the command line. Hydra keeps an Exception as the job's result, and
    starts the next job."""

    def __init__(self, stopped: StoppedError) -> None:
        super().__init__(stopped)
        self.stopped = stopped


def train(sweep: Sweep, plugins: Plugins, jobs: Sequence[Job]) -> list[str]:
    """Train the runs by the launcher and the sweeper; returns the names of those that failed.

    Raises UserError for what a plugin raises, and StoppedError.
    """
    folder = JobFolder(sweep.folder)
    folder.begin()
    if plugins.is_on_slurm:
        prepare_slurm(plugins.settings.launcher)
        print_line(f"submitting the runs to Slurm; what they print is in {sweep.folder}/.submitit")
    known = () if plugins.has_sweeper else jobs
    signals = stopping_jobs(folder, known, sweep.advice) if plugins.launcher == "joblib" else nullcontext()
    try:
        with to_user_error(f"hydra/launcher={plugins.launcher} hydra/sweeper={plugins.sweeper}"), signals:
            call_hydra(Task(sweep, plugins, parent=os.getpid()), command_line(sweep, plugins))
    except LeaveSweepError as left:
        raise left.stopped from None
    except UserError as error:  # Optuna also raises if no run has a result
        if isinstance(error, StoppedError) or not folder.failed():
            raise
        print_failure(error)
        return folder.failed()
    except KeyboardInterrupt:
        if plugins.is_on_slurm:
            print_line("the jobs continue without this command: squeue --me lists them, scancel ends them", error=True)
        raise
    found = sweep.folder / "optimization_results.yaml"
    if plugins.sweeper == "optuna" and found.is_file():
        best = files.read_record(found)
        values = " ".join(f"{key}={value}" for key, value in best["best_params"].items())
        print_line(f"best: {values} ({sweep.metric or 'loss'} {best['best_value']:.4f})")
    return folder.failed()


def prepare_slurm(launcher: DictConfig) -> None:
    """Set environment variables that submitit and Slurm read, here and in the jobs.

    Before its time limit a run then gets SIGTERM, at which it saves, instead of SIGUSR2. And srun gets --cpus-per-task.
    Since Slurm 22.05 srun does not take it from the job: a run and all its loaders would share one core.
    """
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "TERM"
    if launcher.cpus_per_task:
        os.environ["SRUN_CPUS_PER_TASK"] = str(launcher.cpus_per_task)


def command_line(sweep: Sweep, plugins: Plugins) -> list[str]:
    """The words of the sweep as Hydra's main takes them."""
    words = [*plugins.words, *plugins.default_words(sweep.metric), *sweep.words]
    declared = [f"++{word}" if is_in_dictionary(key_of(word), TrainConfig) else word for word in words]
    own = [
        f"hydra.sweep.dir={quote(str(sweep.folder))}", "hydra.sweep.subdir=.", "hydra.output_subdir=null",
        "hydra.job.name=clipscale", "hydra/job_logging=none", "hydra/hydra_logging=none",
    ]  # fmt: skip
    if sweep.config_dir:
        own.append(f"hydra.searchpath=[file://{Path(sweep.config_dir).resolve()}]")
    return [*declared, *own]


def call_hydra(task: "Task", words: Sequence[str]) -> None:
    """Call Hydra's main, which raises errors of plugins and does not print them."""
    typed = sys.argv
    sys.argv = ["clipscale", "--multirun", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(config_path=str(conf_dir()), config_name="train", version_base=HYDRA_VERSION)(task)()
    finally:
        sys.argv = typed


@dataclass(frozen=True)
class Task:
    """The function that a launcher calls for each run. It may be unpickled in another process, on another machine."""

    sweep: Sweep
    plugins: Plugins
    # The process of the command line.
    parent: int

    def __call__(self, _: DictConfig) -> float | None:
        """Train the run. For a sweeper, returns its result, and raises its error."""
        in_parent = os.getpid() == self.parent
        if not in_parent:
            multiprocessing.set_start_method(None, force=True)  # joblib's own method is unknown in a run's processes
            prepare_output()
            ignore_output_errors()
        hydra_job = HydraConfig.get()
        words = [word.lstrip("+") for word in hydra_job.overrides.task]
        GlobalHydra.instance().clear()  # Hydra composed this job; the run composes its own settings
        name = folder_name(words, self.sweep.common)
        folder = JobFolder(self.sweep.folder)
        with folder.lock(name):
            if folder.is_stopping:
                return None
            print_line(f"run {hydra_job.job.num + 1}: {name}")
            if self.plugins.launcher == "joblib" and not in_parent:  # runs side by side print on one terminal
                os.environ[RUN_LABEL] = name  # a run's workers have it too
            try:
                return self.train(words, name)
            except FAILURES as error:
                if isinstance(error, StoppedError):
                    leave(error, in_parent=in_parent)
                print_failure(error, getattr(error, "details", ""))
                folder.note_failure(name, one_line(error))
                if self.plugins.has_sweeper:
                    raise
        return None

    def train(self, words: Sequence[str], name: str) -> float | None:
        """Check and train the run; the result for a sweeper."""
        config = compose_settings("train", words, self.sweep.config_dir, in_sweep=name)
        job = Job.in_sweep(config, self.sweep.folder, name)
        job.check()
        result = job.train(self.sweep.advice)
        return objective(result, config.sweep.metric) if self.plugins.has_sweeper else None


def leave(stopped: StoppedError, *, in_parent: bool) -> None:
    """Leave the sweep after a signal, if the run was in the process of the command line, and a Slurm job that is to be
    requeued, as `launch/slurm.sh` does it. Otherwise returns: the run counts as failed."""
    if in_parent:
        raise LeaveSweepError(stopped)
    if "SUBMITIT_EXECUTOR" in os.environ and stopped.signum == signal.SIGTERM:
        print_line(stopped, error=True)
        signal.raise_signal(signal.SIGTERM)  # submitit requeues the job, and ends this process


def objective(result: RunResult, metric: str) -> float:
    """The number that the sweeper optimizes: the run's result that `sweep.metric` names, or without one its last loss.

    Names are as in `checkpoint.best`. Raises UserError.
    """
    if not metric:
        value: float | None = result["loss"]
    else:
        goal = Goal.parse("sweep.metric", metric)
        label = goal.shortest_match(result["eval"])
        value = result["eval"][label].get(goal.metric) if label else None
    if value is None:
        measured = [f"{label}/{name}" for label, metrics in result["eval"].items() for name in metrics]
        raise UserError(f"sweep.metric={metric}: the run has {one_of(measured)}; the same command with one of them")
    if not math.isfinite(value):
        raise UserError(f"sweep.metric={metric}: it is {value} after the run; the sweeper cannot use that")
    return value


@contextmanager
def stopping_jobs(folder: JobFolder, jobs: Sequence[Job], advice: str) -> Iterator[None]:
    """Context of joblib's work: at the first signal all runs save, and then StoppedError is raised.

    joblib itself kills its processes when this process is interrupted. Other launchers run jobs in this process, or not
    in its children. Further signals change nothing, but a later Ctrl-C raises KeyboardInterrupt.
    """
    came_at: float | None = None
    stopped: StoppedError | None = None

    def stop(signum: int, _: object) -> None:
        nonlocal came_at, stopped
        if came_at is not None:
            if signum == signal.SIGINT and time.monotonic() - came_at > SAME_CTRL_C_S:
                raise KeyboardInterrupt
            return
        came_at = time.monotonic()
        folder.stop()
        if signum not in TO_GROUP:
            for child in psutil.Process().children():
                child.send_signal(signum)
        folder.wait_for_jobs()
        complete = sum((Path(job.config.run) / RESULT).is_file() for job in jobs)
        known = f"{complete} of {counted(len(jobs), 'run')} complete; " if jobs else ""
        stopped = StoppedError(f"{stop_message(signum)}; {known}{advice}", effective_signal(signum))
        raise stopped

    with handling_signals(stop, lambda _: None):
        yield
    if stopped:  # an import swallowed the exception
        raise stopped
