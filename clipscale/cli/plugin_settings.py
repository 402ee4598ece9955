"""Composes the command line of a sweep by Hydra's plugins: Hydra's own settings, and the runs' settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from clipscale.cli import compose, sweep
from clipscale.common.errors import UserError
from clipscale.common.goal import Goal
from clipscale.common.text import did_you_mean, one_of

# Hydra's own settings that a sweep takes: these groups, and the keys of the chosen launcher and sweeper.
GROUPS = ("hydra/launcher", "hydra/sweeper", "hydra/sweeper/sampler")
SECTIONS = ("hydra.launcher", "hydra.sweeper")
# Launchers and sweepers of the extra `sweeps`.
EXTRA = ("joblib", "submitit_local", "submitit_slurm", "optuna")


@dataclass(frozen=True)
class PluginSweep:
    """A sweep as its command line composes it."""

    # Words of Hydra's own settings, and of the runs' settings.
    hydra_words: list[str]
    run_words: list[str]
    # Hydra's own settings.
    hydra: DictConfig
    # If a sweeper chooses the runs later, only one that it may choose.
    runs: sweep.SweepRuns

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
        return self.runs.configs[0].sweep.metric


def compose_sweep(words: Sequence[str], config_dir: str | None) -> PluginSweep:
    """Compose the settings of Hydra, of its plugins and of the runs. Raises UserError."""
    hydra_words = [word for word in words if compose.is_hydra_setting(word)]
    chosen = hydra_settings(hydra_words)
    check_one_task(chosen.runtime.choices["hydra/launcher"], chosen.launcher)
    _, run_words = compose.overrides("train", [word for word in words if word not in hydra_words], sweep=True)
    all_known = chosen.runtime.choices["hydra/sweeper"] == "basic"
    find_runs = sweep.runs_of if all_known else first_run
    return PluginSweep(hydra_words, run_words, chosen, find_runs(run_words, config_dir))


def key_of(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def hydra_settings(words: Sequence[str]) -> DictConfig:
    """Compose Hydra's own settings with the words. Raises UserError for settings that neither knows."""
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
    """The words without choices, which all runs of a sweep have, as Hydra gives them to a job."""
    return [
        f"{override.get_key_element()}={override.get_value_element_as_str()}"
        for override in parse(words)
        if not override.is_sweep_override()
    ]


def first_run(words: Sequence[str], config_dir: str | None) -> sweep.SweepRuns:
    """The sweep's folder, and the run with the first of each key's values. Raises UserError."""
    chosen = common_words(words)
    for override in parse(words):
        if override.is_interval_sweep():
            interval: Any = override.value()
            if interval.start > interval.end:
                raise UserError(f"{override.input_line}: the smaller number comes first")
            if "log" in interval.tags and interval.start <= 0:
                raise UserError(f"{override.input_line}: log takes numbers above 0")
            chosen.append(f"{override.get_key_element()}={interval.start}")
        elif override.is_sweep_override():
            value = next(override.sweep_string_iterator(), None)
            if value is None:
                raise UserError(f"{override.input_line}: it has no values")
            chosen.append(f"{override.get_key_element()}={value}")
    config = compose.settings("train", chosen, config_dir)
    folder = sweep.folder_of_sweep(config.run)
    return sweep.SweepRuns(folder, [sweep.run_in_sweep(config, folder, "first")], bool(config.run))


def default_words(swept: PluginSweep) -> list[str]:
    """Words with defaults that suit runs, for the launcher's and sweeper's keys that the user has not typed."""
    low = not swept.metric or Goal.parse("sweep.metric", swept.metric).is_minimum
    suitable = {
        # a run may be requeued as often as its time limit ends it: it goes on where it was
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
