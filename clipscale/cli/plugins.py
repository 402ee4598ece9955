"""`clipscale train -m hydra/launcher=NAME hydra/sweeper=NAME ...`: a sweep by plugins of Hydra, through its `main`.

A launcher starts each run as a job: submitit on Slurm, joblib beside other jobs on this machine. A sweeper chooses the
values; Optuna does it by the results of earlier runs. A job is the parent of its run's workers. Folders, locks,
resuming and copies are as in `sweep.py`.
"""

import fcntl
import math
import multiprocessing
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

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
from clipscale.common import files
from clipscale.common.checkpoints import LOWER_IS_BETTER, Best
from clipscale.common.errors import StoppedError, UserError, library, one_line
from clipscale.common.hardware import prepare_torch
from clipscale.common.record import Record, RunResult
from clipscale.common.terminal import print_failure, print_line
from clipscale.common.units import nearest, one_of
from clipscale.config.presets import conf_dir
from clipscale.config.train import TrainConfig
from clipscale.launch import local
from clipscale.own_machine.output import outlive_output, prepare_output
from clipscale.tools.data import demo

# Hydra's own settings that a sweep takes: these groups, and the keys of the chosen launcher and sweeper.
GROUPS = ("hydra/launcher", "hydra/sweeper", "hydra/sweeper/sampler")
SECTIONS = ("hydra.launcher", "hydra.sweeper")
# Launchers and sweepers of the extra `sweeps`.
EXTRA = ("joblib", "submitit_local", "submitit_slurm", "optuna")
# The folder of a sweep's jobs, inside the sweep's folder. Each job locks a file there, and writes into it why it has
# failed.
JOBS = ".jobs"
# A file beside them, which exists while a signal ends the sweep: no further job starts.
STOPPING = "stopping"
# Signals that joblib's parent passes on. Ctrl-C and a terminal's hangup come to the whole group of processes.
TO_GROUP = (signal.SIGINT, signal.SIGHUP)


def main(line: Namespace) -> int:
    """Run the sweep; the exit status is 1 if any run failed, and 128 + the number of a signal that ended it.

    What can be checked of the runs is checked before the first one starts. Raises UserError.
    """
    of_hydra = [word for word in line.words if compose.is_hydra_setting(word)]
    chosen, folder, configs = composed_runs(line)
    launcher = chosen.runtime.choices["hydra/launcher"]
    sweeper = chosen.runtime.choices["hydra/sweeper"]
    if sweeper == "basic":
        sweep.warn_of_metric(configs[0])
    elsewhere = launcher == "submitit_slurm"
    # the machine of the command line may have no GPU
    sweep.check_runs([replace(config, device="auto") for config in configs] if elsewhere else configs, line)
    if line.cfg or line.check:
        return 0
    job = Job(folder, frozenset(common_words(line.words)), line.config_dir, os.getpid(), has_sweeper=sweeper != "basic")
    job.begin()
    if any(demo.is_missing(config.data.train or ()) for config in configs):
        demo.main()  # once, and not in several jobs at the same time
    if elsewhere:
        prepare_slurm(chosen.launcher)
        print_line(f"submitting the runs to Slurm; what they print is in {folder}/.submitit")
    defaults = defaults_of(chosen, configs[0].sweep.metric)
    typed = {key_of(word) for word in of_hydra}
    words = [*of_hydra, *(f"{key}={value}" for key, value in defaults.items() if key not in typed)]
    try:
        with library(f"hydra/launcher={launcher} hydra/sweeper={sweeper}"), job.passing_signals_on(launcher):
            launch(job, [*words, *line.words])
    except SystemExit as stopped:  # by a signal to a run in this process
        return int(stopped.code or 0)
    except StoppedError:
        raise
    except UserError as error:  # Optuna's too: no run has a result
        if not job.failed():
            raise
        print_failure(error)
        return sweep.report_end(folder, job.failed())
    except KeyboardInterrupt:
        if elsewhere:
            print_line("the jobs go on without this command: squeue --me lists them, scancel ends them", error=True)
        raise
    if (results := folder / "optimization_results.yaml").is_file() and sweeper == "optuna":
        print_best(files.read_record(results), configs[0].sweep.metric)
    return sweep.report_end(folder, job.failed())


def composed_runs(line: Namespace) -> tuple[DictConfig, Path, list[TrainConfig]]:
    """Hydra's own settings, the sweep's folder, and its runs. Changes the line's words to the runs'. Raises UserError.

    Where a sweeper chooses the values, the runs are not known. Then this returns one that it may choose.
    """
    of_hydra = [word for word in line.words if compose.is_hydra_setting(word)]
    chosen = settings_of_plugins(of_hydra)
    check_launcher(chosen.runtime.choices["hydra/launcher"], chosen.launcher)
    others = [word for word in line.words if word not in of_hydra]
    _, line.words = compose.overrides("train", others, sweep=True)
    all_known = chosen.runtime.choices["hydra/sweeper"] == "basic"
    return chosen, *(sweep.runs_of(line) if all_known else first_run(line))


def key_of(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def settings_of_plugins(words: Sequence[str]) -> DictConfig:
    """Hydra's own settings with the words, composed. Raises UserError for what it or the plugins do not know."""
    for word in words:
        key = key_of(word)
        if key not in GROUPS and not key.startswith(tuple(f"{section}." for section in SECTIONS)):
            raise UserError(
                f"{word}: of Hydra's settings a sweep takes {one_of(GROUPS)}, and the keys of the chosen ones, as in "
                "hydra.launcher.partition=gpu; the sweep's folder is run=NAME"
            )
    groups = [word for word in words if key_of(word) in GROUPS]
    chosen = composed(groups)
    for word in words:
        key = key_of(word)
        section = ".".join(key.split(".")[:2])
        if word.startswith("+") or key in GROUPS:
            continue
        allowed = [f"{section}.{name}" for name in OmegaConf.select(chosen, section.removeprefix("hydra."))]
        if ".".join(key.split(".")[:3]) not in allowed:
            of = chosen.runtime.choices[section.replace(".", "/")]
            raise UserError(f"{word}: {section.replace('.', '/')}={of} has no such setting{nearest(key, allowed)}")
    return composed(words)


def composed(words: Sequence[str]) -> DictConfig:
    """Hydra's own settings. Raises UserError."""
    try:
        return compose.composed("train", words, with_own=True).hydra
    except compose.HYDRA_ERRORS as error:
        for word in words:
            if key_of(word) in GROUPS[:2] and word.partition("=")[2] in EXTRA and "Could not find" in str(error):
                raise UserError(f"{word}: its package is not installed; pip install 'clipscale[sweeps]'") from error
        raise compose.one_line_error(error) from error


def check_launcher(name: str, launcher: DictConfig) -> None:
    """Raise UserError for jobs of several tasks, which would all train the same run."""
    for key in ("nodes", "tasks_per_node"):
        if launcher.get(key, 1) != 1:
            raise UserError(
                f"hydra.launcher.{key}={launcher[key]}: a job of a sweep is one task on one node, and starts a process "
                "for each of its GPUs; a run on several nodes is a Slurm job of its own"
            )
    if name == "joblib" and launcher.get("backend") not in (None, "loky"):
        raise UserError(f"hydra.launcher.backend={launcher.backend}: runs need processes of their own; leave it out")


def parsed(words: Sequence[str]) -> list[Override]:
    """Words as Hydra reads them. Raises UserError."""
    try:
        return OverridesParser.create().parse_overrides(list(words))
    except HydraException as error:
        raise compose.one_line_error(error) from error


def common_words(words: Sequence[str]) -> list[str]:
    """The words with one value, which all runs of a sweep have, as Hydra gives them to a job."""
    return [
        f"{each.get_key_element()}={each.get_value_element_as_str()}"
        for each in parsed(words)
        if not each.is_sweep_override()
    ]


def first_run(line: Namespace) -> tuple[Path, list[TrainConfig]]:
    """The sweep's folder, and the run with the first of each key's values. Raises UserError."""
    words = common_words(line.words)
    for each in parsed(line.words):
        if each.is_interval_sweep():
            interval: Any = each.value()
            words.append(f"{each.get_key_element()}={interval.start}")
        elif each.is_sweep_override():
            words.append(f"{each.get_key_element()}={next(each.sweep_string_iterator())}")
    config = compose.settings("train", words, line.config_dir)
    folder = sweep.folder_of(config.run)
    return folder, [sweep.of_sweep(config, folder, "first")]


def defaults_of(chosen: DictConfig, metric: str) -> Record:
    """Values that suit runs, for keys that the launcher and the sweeper have."""
    low = not metric or metric.rpartition("/")[2] in LOWER_IS_BETTER
    wanted = {
        # as often as its time limit ends it: a requeued run goes on where it was
        "hydra.launcher.max_num_timeout": 1000,
        "hydra.sweeper.direction": "minimize" if low else "maximize",
        # a run that fails ends nothing but itself
        "hydra.sweeper.max_failure_rate": 1.0,
        # the same command again proposes the same values, whose runs are complete
        "hydra.sweeper.sampler.seed": 0,
    }
    sections: Record = {section: OmegaConf.select(chosen, section.removeprefix("hydra.")) for section in SECTIONS}
    sections["hydra.sweeper.sampler"] = sections["hydra.sweeper"].get("sampler") or {}
    return {key: value for key, value in wanted.items() if key.rpartition(".")[2] in sections[key.rpartition(".")[0]]}


def prepare_slurm(launcher: DictConfig) -> None:
    """Set environment variables that submitit and Slurm read, here and in the jobs.

    Before its time limit a run then gets SIGTERM, on which it saves, and not SIGUSR2. And srun gets --cpus-per-task,
    which it does not take over since Slurm 22.05: a run and all its loaders would share one core.
    """
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "TERM"
    if launcher.cpus_per_task:
        os.environ["SRUN_CPUS_PER_TASK"] = str(launcher.cpus_per_task)


def launch(job: "Job", words: Sequence[str]) -> None:
    """Call Hydra's main with the words of a command line. What it and its plugins raise passes."""
    declared = [f"++{word}" if compose.is_in_dictionary(key_of(word), TrainConfig) else word for word in words]
    of_hydra = [
        f"hydra.sweep.dir={compose.quoted(str(job.folder))}", "hydra.sweep.subdir=.", "hydra.output_subdir=null",
        "hydra.job.name=clipscale", "hydra/job_logging=none", "hydra/hydra_logging=none",
    ]  # fmt: skip
    if job.config_dir:
        of_hydra.append(f"hydra.searchpath=[file://{Path(job.config_dir).resolve()}]")
    typed = sys.argv
    sys.argv = ["clipscale", "--multirun", *declared, *of_hydra]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that it raises an error, and does not print it
    try:
        hydra.main(config_path=str(conf_dir()), config_name="train", version_base=compose.VERSION)(job)()
    finally:
        sys.argv = typed


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
        measured = [f"{label}/{each}" for label, metrics in result["eval"].items() for each in metrics]
        raise UserError(f"sweep.metric={metric}: the run has {one_of(measured)}; the same command with one of them")
    if not math.isfinite(metrics[key]):
        raise UserError(f"sweep.metric={metric}: it is {metrics[key]} after the run; the sweeper cannot use that")
    return metrics[key]


@dataclass(frozen=True)
class Job:
    """What a launcher calls for each run, perhaps in another process or on another machine, where it is unpickled."""

    # The sweep's folder.
    folder: Path
    # The words that all runs share, so that the others name a run's folder.
    common: frozenset[str]
    config_dir: str | None
    # The process of the command line.
    parent: int
    # Whether a sweeper gets the result, or the failure.
    has_sweeper: bool

    def __call__(self, _: DictConfig) -> float | None:
        """Train the run, and return its result; None without one. For a sweeper, raises UserError and WorkerError."""
        here = os.getpid() == self.parent
        if not here:
            multiprocessing.set_start_method(None, force=True)  # not joblib's own, which a run's processes do not know
            prepare_output()
            prepare_torch()
            outlive_output()
        os.environ.setdefault("WANDB_RUN_GROUP", self.folder.name)  # wandb shows the runs as one group
        job = HydraConfig.get()
        words = [word.lstrip("+") for word in job.overrides.task]
        GlobalHydra.instance().clear()  # it has composed the job
        name = sweep.folder_name([word for word in words if word not in self.common])
        with self.alone(name) as note:
            if (self.folder / JOBS / STOPPING).exists():
                return None
            print_line(f"run {job.job.num + 1}: {name}")
            try:
                config = sweep.of_sweep(compose.settings("train", words, self.config_dir), self.folder, name)
                cli_train.check(config)
                cli_train.check_weights(config)
                return objective(cli_train.main(config, isolated=True), config.sweep.metric)
            except (UserError, OSError, local.WorkerError) as error:
                if isinstance(error, StoppedError):
                    leave(error, here=here)
                print_failure(error, getattr(error, "details", ""))
                note.write(one_line(error))
                if self.has_sweeper:
                    raise
                return None

    @contextmanager
    def alone(self, name: str) -> Iterator[IO[str]]:
        """Hold the run's file: a job with equal values waits here until this one has ended, and finds it complete."""
        with (self.folder / JOBS / name).open("a") as file:
            with suppress(OSError):  # without locks there is still the run's own, which says so
                fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(0)
            yield file

    def begin(self) -> None:
        """Forget what failed in an earlier sweep of this folder."""
        (self.folder / JOBS).mkdir(parents=True, exist_ok=True)
        for name in (STOPPING, *self.failed()):
            (self.folder / JOBS / name).unlink(missing_ok=True)

    def failed(self) -> list[str]:
        """The names of the runs that have failed."""
        return sorted(note.name for note in (self.folder / JOBS).iterdir() if note.read_text())

    @contextmanager
    def passing_signals_on(self, launcher: str) -> Iterator[None]:
        """Around joblib's work: at a signal all runs save, and then StoppedError is raised.

        joblib itself kills its processes when this one is interrupted. Other launchers run jobs in this process, or in
        no child of it.
        """
        if launcher != "joblib":
            yield
            return

        def stop(number: int, _: object) -> None:
            if (self.folder / JOBS / STOPPING).exists():
                raise KeyboardInterrupt
            (self.folder / JOBS / STOPPING).touch()
            if number not in TO_GROUP:
                for child in psutil.Process().children():
                    child.send_signal(number)
            for note in (self.folder / JOBS).iterdir():
                with note.open("a") as held:
                    fcntl.flock(held, fcntl.LOCK_EX)
            raise StoppedError("stopped: the same command goes on", number)

        numbers = (*TO_GROUP, signal.SIGTERM, signal.SIGUSR1)
        before = {
            number: signal.signal(number, stop) for number in numbers if signal.getsignal(number) != signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def leave(stopped: StoppedError, *, here: bool) -> None:
    """After a signal has ended a run, do one of these:

    - The run is in this process: leave the sweep.
    - On Slurm, after SIGTERM: put the job back into the queue, as `launch/slurm.sh` does.
    - Otherwise return: the run counts as failed.
    """
    if here:
        print_line(stopped, error=True)
        raise SystemExit(128 + stopped.number)
    if "SUBMITIT_EXECUTOR" in os.environ and stopped.number == signal.SIGTERM:
        print_line(stopped, error=True)
        signal.raise_signal(signal.SIGTERM)  # submitit requeues the job, and ends this process
