"""Hydra's own settings of a sweep: the launcher that starts its runs, and the sweeper that chooses their values."""

from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from clipscale.cli import compose
from clipscale.common.errors import UserError
from clipscale.common.goal import Goal
from clipscale.common.text import did_you_mean, one_of

# Hydra's own settings that a sweep takes: these groups, and the keys of the chosen launcher and sweeper.
GROUPS = ("hydra/launcher", "hydra/sweeper", "hydra/sweeper/sampler")
SECTIONS = ("hydra.launcher.", "hydra.sweeper.")
# Launchers and sweepers of the extra `sweeps`.
EXTRA = ("joblib", "submitit_local", "submitit_slurm", "optuna")


@dataclass(frozen=True)
class Plugins:
    """The launcher and the sweeper of a sweep."""

    # The words that choose and set them.
    words: list[str]
    # Hydra's own settings.
    settings: DictConfig

    @property
    def launcher(self) -> str:
        return self.settings.runtime.choices["hydra/launcher"]

    @property
    def sweeper(self) -> str:
        return self.settings.runtime.choices["hydra/sweeper"]

    @property
    def has_sweeper(self) -> bool:
        """Whether a sweeper chooses the values by the results."""
        return self.sweeper != "basic"

    @property
    def is_on_slurm(self) -> bool:
        return self.launcher == "submitit_slurm"

    def default_words(self, metric: str) -> list[str]:
        """Words with defaults that suit runs, for the keys that the user has not typed. `metric`: `sweep.metric`."""
        low = not metric or Goal.parse("sweep.metric", metric).is_minimum
        suitable = {
            # requeue a run each time that its time limit ends it: it continues from its checkpoint
            "hydra.launcher.max_num_timeout": 1000,
            "hydra.sweeper.direction": "minimize" if low else "maximize",
            # a failed run ends no other run
            "hydra.sweeper.max_failure_rate": 1.0,
            # the same command again proposes the same values: those runs are complete
            "hydra.sweeper.sampler.seed": 0,
        }
        typed = {key_of(word) for word in self.words}
        words = []
        for key, value in suitable.items():
            section, _, name = key.removeprefix("hydra.").rpartition(".")
            if key not in typed and name in (OmegaConf.select(self.settings, section) or {}):
                words.append(f"{key}={value}")
        return words


def compose_plugins(words: list[str]) -> Plugins:
    """Compose Hydra's own settings with the words. Raises UserError for settings that neither knows, and for launchers
    whose jobs would disturb each other."""
    for word in words:
        key = key_of(word)
        if key not in GROUPS and not key.startswith(SECTIONS):
            raise UserError(
                f"{word}: of Hydra's settings a sweep takes {one_of(GROUPS)}, and the keys of the chosen ones, as in "
                "hydra.launcher.partition=gpu; the sweep's folder is run=NAME"
            )
    chosen = compose_hydra([word for word in words if key_of(word) in GROUPS])
    for word in words:
        key = key_of(word)
        if word.startswith("+") or key in GROUPS:
            continue
        section, name = key.split(".")[1:3]
        allowed = [f"hydra.{section}.{known}" for known in chosen[section]]
        if f"hydra.{section}.{name}" not in allowed:
            choice = f"hydra/{section}={chosen.runtime.choices[f'hydra/{section}']}"
            raise UserError(f"{word}: {choice} has no such setting{did_you_mean(key, allowed)}")
    plugins = Plugins(words, compose_hydra(words))
    check_one_task(plugins)
    return plugins


def key_of(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def compose_hydra(words: Sequence[str]) -> DictConfig:
    """Hydra's own settings. Raises UserError for a package that is not installed."""
    try:
        return compose.compose_config("train", words, with_hydra=True).hydra
    except compose.HYDRA_ERRORS as error:
        for word in words:
            is_plugin = key_of(word) in GROUPS[:2] and word.partition("=")[2] in EXTRA
            if is_plugin and "Could not find" in str(error):
                raise UserError(f"{word}: its package is not installed; pip install 'clipscale[sweeps]'") from error
        raise compose.one_line_error(error) from error


def check_one_task(plugins: Plugins) -> None:
    """Raise UserError for jobs of several tasks, which would all train the same run."""
    launcher = plugins.settings.launcher
    for key in ("nodes", "tasks_per_node"):
        if launcher.get(key, 1) != 1:
            raise UserError(
                f"hydra.launcher.{key}={launcher[key]}: a job of a sweep is one task on one node, and starts a process "
                "for each of its GPUs; a run on several nodes is a Slurm job of its own"
            )
    if plugins.launcher == "joblib" and launcher.get("backend") not in (None, "loky"):
        raise UserError(f"hydra.launcher.backend={launcher.backend}: runs need processes of their own; leave it out")
