"""The settings of a verb from the command line: Hydra composes the dataclasses, conf/ and the overrides.

Every mistake becomes a UserError of one line.
"""

import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clipscale.cli.verbs import VERBS
from clipscale.cli.words import is_hydra_setting
from clipscale.common import files, ranks
from clipscale.common.errors import UserError
from clipscale.common.text import did_you_mean, one_of
from clipscale.config.parse import ALIASES, as_typed, dataclass_from, is_known_key, removal_message, unknown_key
from clipscale.config.presets import conf_dir, default_choices
from clipscale.config.secrets import from_environment
from clipscale.config.setting import flatten, settings_of
from clipscale.config.train_config import TrainConfig
from clipscale.models.weights.model_settings import resolve_architecture
from clipscale.run_folder.paths import run_folder, run_to_resume

QUOTES = "'\""
# Behave as this version of Hydra.
HYDRA_VERSION = "1.3"
# The exceptions of Hydra and OmegaConf for wrong words and presets.
HYDRA_ERRORS = (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError)


def compose_settings(name: str, words: Sequence[str], config_dir: str | None = None, *, in_sweep: str = "") -> Any:
    """The settings of a verb: its defaults, conf/ and Hydra's overrides `words`. Raises UserError for any mistake.

    `in_sweep`: the name of the run's folder in its sweep's folder.
    """
    verb = VERBS[name]
    if config_dir and not Path(config_dir).is_dir():
        raise UserError(f"--config-dir {config_dir}: there is no such folder; it holds experiment/NAME.yaml")
    changes = values_of_presets(words, config_dir)
    for word in words:
        check_key(name, word)
        is_new_key = is_in_dictionary(word.partition("=")[0], verb.settings)
        changes.append(f"++{word}" if is_new_key else word)
    if config_dir:
        changes.append(f"hydra.searchpath=[file://{Path(config_dir).resolve()}]")
    try:
        tree: Any = OmegaConf.to_container(compose_config(name, changes), resolve=True)
    except HYDRA_ERRORS as error:
        raise one_line_error(error) from error
    # Presets may set what this verb does not use, such as settings of training in data=demo.
    ignored = settings_of(TrainConfig).keys() - settings_of(verb.settings)
    values = dataclass_from(verb.settings, tree, ignored=ignored)
    if not hasattr(values, "model"):
        return values
    chosen = any(re.match(r"[+]*model(\.name|\.architecture.*)?=", word) for word in words)
    resumed = None
    needs_bias = False
    if isinstance(values, TrainConfig):
        needs_bias = values.has_logit_bias
        folder = run_folder(values.run) / in_sweep if values.run and in_sweep else values.run
        resumed = run_to_resume(str(folder), values.resume, own_first=bool(in_sweep) or ranks.is_restarted())
    return replace(
        values, model=resolve_architecture(values.model, chosen=chosen, needs_bias=needs_bias, resumed=resumed)
    )


def compose_config(name: str, changes: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """A verb's defaults, conf/ and overrides, composed by Hydra. Raises HYDRA_ERRORS.

    `with_hydra`: also Hydra's own settings, under `hydra`.
    """
    verb = VERBS[name]
    node = asdict(verb.settings(), dict_factory=with_lists)
    with warnings.catch_warnings(action="ignore"), initialize_config_dir(str(conf_dir()), version_base=HYDRA_VERSION):
        ConfigStore.instance().store(name="settings", node=node)
        return compose(verb.conf or "settings", list(changes), return_hydra_config=with_hydra)


def is_in_dictionary(key: str, config: type) -> bool:
    """Whether the setting is a dictionary, or in one."""
    dictionaries = (name for name, setting in settings_of(config).items() if setting.kind is dict)
    return any(f"{key}.".startswith(f"{name}.") for name in dictionaries)


def with_lists(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The fields of settings, with tuples as lists: OmegaConf 2.4 lets no other value replace a tuple."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in pairs}


def values_of_presets(words: Sequence[str], config_dir: str | None) -> list[str]:
    """The values of the presets of optimizer and loss that are typed beside an experiment. They override its own."""
    typed_words = {}
    for word in words:
        key, _, value = word.partition("=")
        typed_words[key] = value.strip(QUOTES)
    if "experiment" not in typed_words:
        return []
    values: dict[str, object] = {}
    for group in ("optim", "loss"):
        for folder in (conf_dir(), Path(config_dir or conf_dir())):
            file = folder / group / f"{typed_words.get(group)}.yaml"
            if file.exists():
                preset = files.read_yaml(file)
                values |= flatten(preset if group in preset else {group: preset})
    return [f"{key}={as_typed(value)}" for key, value in values.items() if value != {}]


def demo_folder() -> str:
    """`${demo:}`: the folder of the demo set."""
    from clipscale.tools.data.demo_folder import user_folder

    return str(user_folder())


with warnings.catch_warnings(action="ignore"):  # about changes in Hydra 1.5 and after OmegaConf 2.4
    OmegaConf.register_new_resolver("demo", demo_folder, replace=True)
    OmegaConf.register_new_resolver("oc.env", from_environment, replace=True)


def check_key(name: str, word: str) -> None:
    """Raise UserError for a word KEY=VALUE whose key or value the verb does not have."""
    key, _, value = word.partition("=")
    if removal := removal_message(f"{key}={value.strip(QUOTES)}", name):
        raise UserError(removal)
    verb = VERBS[name]
    declared = settings_of(verb.settings)
    groups = default_choices(verb.conf)
    if key in declared or key in groups or is_in_dictionary(key, verb.settings):
        return
    meant = ALIASES.get(key, key).partition("=")[0]
    if is_known_key(settings_of(TrainConfig), meant) and not is_known_key(declared, meant):
        raise UserError(f"{key}: {name} does not use it; `clipscale {name} --help` lists what it uses")
    raise UserError(unknown_key(key, [*declared, *groups], name))


def one_line_error(error: Exception) -> UserError:
    """One line for an error of Hydra or OmegaConf."""
    text = " ".join(str(error).split())
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        file = str(error.missing_cfg_file)
        group, _, choice = file.rpartition("/") if is_hydra_setting(file) else file.partition("/")
        options = error.options or []
        meant = ALIASES.get(f"{group}={choice}", choice.lower())
        text = f"{group}={choice}: unknown; choose {one_of(options)}{did_you_mean(meant, options)}"
        if group == "data":
            text += "; shards are given by data.train=PATH"
    elif isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        better = value.strip("= ")
        remedy = f"write {key}={better}" if better != value else "close its brackets, or put its texts"
        text = f"{error.override}: cannot be read; {remedy}, in plain quotes if need be"
    elif several := re.search(r"Ambiguous value for argument '((.*?)=(.*?))' 1\.", text):
        word, key, value = several.groups()
        text = f"{word}: several values; add -m for a sweep, or write '{key}=[{value}]' for a list"
    elif (refused := re.fullmatch(r"Error merging override (.*)", text)) and error.__cause__:
        text = f"{refused[1]}: {' '.join(str(error.__cause__).partition('full_key:')[0].split())}"
    elif ours := re.search(r"UserError raised while resolving interpolation: (.*?)(?: full_key:|$)", text):
        text = ours[1]
    return UserError(text)
