"""The runs of a sweep from the words of its command line: the combinations, their settings and their folders."""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any, Self

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from clipscale.cli import train_checks, train_verb
from clipscale.cli.compose import compose_settings, one_line_error
from clipscale.cli.sweep.plugins import Plugins
from clipscale.common.errors import UserError
from clipscale.common.files import file_name, unused_path
from clipscale.config.train_config import TrainConfig
from clipscale.launch.failures import WorkerError
from clipscale.run_folder.paths import checkpoints_of, run_folder
from clipscale.run_folder.records import RunResult

# Errors that end a run, and not its sweep. StoppedError is a UserError, but ends both.
FAILURES = (UserError, OSError, WorkerError)


@dataclass(frozen=True)
class Job:
    """A run of a sweep, with its own folder and its own address of a copy."""

    # The name of the run's folder.
    name: str
    config: TrainConfig

    @classmethod
    def in_sweep(cls, config: TrainConfig, folder: Path, name: str) -> Self:
        """The job of a run in the sweep's folder.

        If the run has begun from `resume=PATH` before, it goes on from its own newest checkpoint.
        """
        copy = config.checkpoint.copy
        if copy:
            copy = f"{copy.rstrip('/')}/{name}"
        run = folder / name
        has_begun = config.resume != "none" and checkpoints_of(run)
        resume = "auto" if has_begun else config.resume
        checkpoint = replace(config.checkpoint, copy=copy)
        return cls(name, replace(config, run=str(run), resume=resume, checkpoint=checkpoint))

    def check(self, *, checks_connection: bool = True) -> None:
        """Make the checks that need no torch. Raises UserError, prints warnings."""
        train_checks.check_without_torch(self.config)
        train_checks.check_weights(self.config, checks_connection=checks_connection)

    def train(self, advice: str) -> RunResult:
        """Train the run. `advice`: which command continues the sweep after a signal. Raises as `train_verb.main`."""
        os.environ.setdefault("WANDB_RUN_GROUP", Path(self.config.run).parent.name)  # wandb shows the runs as one group
        return train_verb.main(self.config, isolated=True, advice=advice)


@dataclass(frozen=True)
class Sweep:
    """What the runs of a sweep share. It holds no run's settings: a launcher writes it to a file, and they may have
    passwords from the environment."""

    folder: Path
    # The words of the runs' settings, and those that all runs have. The others name a run's folder.
    words: list[str]
    common: frozenset[str]
    config_dir: str | None
    # `sweep.metric`.
    metric: str
    # Which command goes on with the sweep after a signal.
    advice: str
    # None if the command line names none.
    plugins: Plugins | None


def compose_runs(words: list[str], config_dir: str | None, plugins: Plugins | None) -> tuple[Sweep, list[Job]]:
    """The sweep and its runs, in Hydra's order; if a sweeper chooses them later, only one that it may choose.

    Combinations with equal settings are one run. Raises UserError, also where two runs would share a folder.
    """
    has_sweeper = plugins is not None and plugins.has_sweeper
    choices = choices_of(words, takes_intervals=has_sweeper)
    check_one_name(choices)
    common = frozenset(values[0] for values in choices if len(set(values)) == 1)
    by_settings = {}
    for combination in product(*(values[:1] if has_sweeper else values for values in choices)):
        name = "first" if has_sweeper else folder_name(combination, common)
        config = compose_settings("train", combination, config_dir, in_sweep=name)
        by_settings[repr(config)] = (name, config)
    names, configs = zip(*by_settings.values())
    run = configs[0].run
    folder = run_folder(run) if run else unused_path(Path("runs") / f"{datetime.now():sweep-%Y%m%d-%H%M%S}")
    shared = {name for name in names if names.count(name) > 1}
    if shared:
        raise UserError(f"-m: several runs would share the folder {folder / min(shared)}; give them one by one")
    missing = [] if run else [shlex.quote(f"run={folder}")]  # without it, another sweep would begin
    if any(config.resume == "none" for config in configs):
        missing.append("resume=auto")
    advice = f"the same command{' with ' if missing else ''}{' '.join(missing)} resumes it"
    sweep = Sweep(folder, words, common, config_dir, configs[0].sweep.metric, advice, plugins)
    return sweep, [Job.in_sweep(config, folder, name) for name, config in zip(names, configs)]


def check_one_name(choices: Sequence[Sequence[str]]) -> None:
    """Raise UserError for several values of `run`. A sweep has one folder, and its runs have names of their own."""
    for values in choices:
        key, _, first = values[0].partition("=")
        if key == "run" and len(set(values)) > 1:
            raise UserError(f"run={first},...: a sweep has one folder, with one for each run in it; give one run=NAME")


def choices_of(words: Sequence[str], *, takes_intervals: bool = False) -> list[list[str]]:
    """For each setting of a sweep, the words KEY=VALUE of its values, as a run gets them. Raises UserError.

    `takes_intervals`: of an interval these are its two ends. Without, it is refused.
    """
    try:
        return [
            [f"{override.get_key_element()}={value}" for value in values_of(override, takes_intervals)]
            for override in OverridesParser.create().parse_overrides(list(words))
        ]
    except HydraException as error:
        raise one_line_error(error) from error


def values_of(override: Override, takes_intervals: bool) -> list[str]:
    """The values of a word. Raises UserError if there are none."""
    word = override.input_line
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    if override.is_interval_sweep():
        if not takes_intervals:
            raise UserError(
                f"{word}: only a sweeper chooses between two numbers; add hydra/sweeper=optuna, or give values, "
                f"{override.get_key_element()}=A,B"
            )
        interval: Any = override.value()
        if interval.start > interval.end:
            raise UserError(f"{word}: the smaller number comes first")
        if "log" in interval.tags and interval.start <= 0:
            raise UserError(f"{word}: log takes numbers above 0")
        return [str(interval.start), str(interval.end)]
    values = [*override.sweep_string_iterator()]
    if not values:
        raise UserError(f"{word}: it has no values")
    return values


def folder_name(words: Sequence[str], common: frozenset[str] = frozenset()) -> str:
    """The name of a run's folder in a sweep, from the words in which it differs from the other runs."""
    differing = [word for word in words if word not in common]
    return file_name(re.sub(r"['\"\\]", "", ",".join(differing))) if differing else "0"
