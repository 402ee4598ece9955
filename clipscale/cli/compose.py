"""The settings of a verb from the command line: Hydra composes the dataclasses, conf/ and the overrides.

Every mistake becomes a UserError of one line.
"""

import re
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clipscale.cli.verbs import FLAGS, VERBS
from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.record import Record
from clipscale.common.units import nearest, one_of, split
from clipscale.config.parse import MEANT, as_typed, misnamed, typed, within
from clipscale.config.presets import conf_dir, default_choices, group_options
from clipscale.config.secrets import from_environment
from clipscale.config.setting import flat, settings_of
from clipscale.config.train import TrainConfig
from clipscale.models.sources import resolve_architecture

# Sections that are typed as their first setting, too.
SHORT = {"holdout": "holdout.share"}


class Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        meant = nearest(message.rpartition(" ")[2], FLAGS)
        raise UserError(f"{message}{meant}; settings are KEY=VALUE; those of open_clip's: docs/howto/open-clip.md")


def parse(argv: Sequence[str]) -> Namespace:
    """Flags (FLAGS) and `words` of a verb: settings, and plain words such as shards.

    Raises UserError.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--config-dir")
    parser.add_argument("words", nargs="*")
    return parser.parse_intermixed_args(argv)


def overrides(name: str, words: Iterable[str], *, sweep: bool = False) -> tuple[list[str], list[str]]:
    """The plain words of a verb that takes some, and the others as Hydra's overrides. Raises UserError.

    Texts such as paths are quoted, and of `samples` and `epochs` the one that is not typed becomes null.
    """
    verb = VERBS[name]
    declared = settings_of(verb.settings)
    texts = {key for key, setting in declared.items() if setting.kind in (str, list)} - {"stages"}
    plain = []
    values = {}
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if verb.words and not (equals and re.fullmatch(r"[a-z_.]+", key)):
            plain.append(word)
            continue
        if not (key and equals):
            raise UserError(
                f"{word}: give settings as KEY=VALUE, as in {word}=... or run={word}; a file of them: --config-dir DIR "
                "experiment=NAME"
            )
        if re.match("hydra[./]", key):
            raise UserError(
                f"{word}: Hydra's launchers and sweepers are not used; -m trains one run after another, and with --cfg "
                "job prints them, to be started by your scheduler, each as a command of its own"
            )
        if key in ("data", "data.train") and verb.words:
            raise UserError(f"{word}: {name} takes {verb.words} as plain words: clipscale {name} {value}")
        is_preset = value in group_options()["data"]
        if key == "data" and not is_preset and (re.search(r"[/*{@.[]", value) or Path(value).exists()):
            key = "data.train"
        key = SHORT.get(key, key)
        if key in values:
            raise UserError(f"{key} is given twice; quote a value with braces, which the shell splits: {key}='...'")
        values[key] = quoted_values(value, sweep=sweep) if key in texts else value
    if values.keys() & {"samples", "epochs", "stages"} and "epochs" in declared:  # an experiment's own count less
        values.setdefault("samples", "null")
        values.setdefault("epochs", "null")
    return plain, [f"{key}={value}" for key, value in values.items()]


def quoted_values(text: str, *, sweep: bool) -> str:
    """A text in quotes, since braces and colons mean something to Hydra; each part of a list `[a,b]` or sweep `a,b`."""
    if text.startswith("[") and text.endswith("]"):
        return f"[{','.join(map(quoted, split(text[1:-1])))}]"
    return ",".join(map(quoted, split(text) if sweep else [text]))


def quoted(text: str) -> str:
    """A text in quotes, if it is not null, quoted, or an interpolation."""
    if text in ("", "null") or text.startswith(("'", '"', "${")):
        return text
    return "'" + text.replace("'", "\\'") + "'"


def settings(name: str, words: Sequence[str], config_dir: str | None = None) -> Any:
    """The settings of a verb: its defaults, conf/ and Hydra's overrides `words`. Raises UserError for any mistake."""
    verb = VERBS[name]
    if config_dir and not Path(config_dir).is_dir():
        raise UserError(f"--config-dir {config_dir}: there is no such folder; it holds experiment/NAME.yaml")
    declared = settings_of(verb.settings)
    trains = settings_of(TrainConfig)
    dictionaries = [key for key, setting in declared.items() if setting.kind is dict]
    groups = default_choices(verb.conf)
    changes = values_of_presets(words, config_dir)
    for word in words:
        key = word.partition("=")[0]
        if any(f"{key}.".startswith(f"{name}.") for name in dictionaries):
            word = f"++{word}"  # new keys
        elif key not in declared and key not in groups:
            meant = MEANT.get(key, key).partition("=")[0]
            if within(trains, meant) and not within(declared, meant):
                raise UserError(f"{key}: {name} does not use it; `clipscale {name} --help` lists what it uses")
            raise UserError(misnamed(key, [*declared, *groups]))
        changes.append(word)
    if config_dir:
        changes.append(f"hydra.searchpath=[file://{Path(config_dir).resolve()}]")
    node = asdict(verb.settings(), dict_factory=with_lists)
    try:
        with warnings.catch_warnings(action="ignore"), initialize_config_dir(str(conf_dir()), version_base="1.3"):
            ConfigStore.instance().store(name="settings", node=node)
            tree: Any = OmegaConf.to_container(compose(verb.conf or "settings", changes), resolve=True)
    except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        raise explained(error) from error
    # Presets may set what this verb does not use, such as settings of training in data=demo.
    values = typed(verb.settings, tree, ignored=trains.keys() - declared)
    if not hasattr(values, "model"):
        return values
    chosen = any(re.match(r"[+]*model(\.name|\.architecture.*)?=", word) for word in words)
    return replace(values, model=resolve_architecture(values.model, chosen=chosen))


def with_lists(pairs: list[tuple[str, Any]]) -> Record:
    """The fields of settings, with lists in the place of tuples, which OmegaConf 2.4 allows no other value."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in pairs}


def values_of_presets(words: Sequence[str], config_dir: str | None) -> list[str]:
    """The values of the presets of optimizer and loss that are typed with an experiment, whose own count less."""
    typed_words = dict(word.split("=", 1) for word in words)
    if "experiment" not in typed_words:
        return []
    values: Record = {}
    for group in ("optim", "loss"):
        for folder in (conf_dir(), Path(config_dir or conf_dir())):
            file = folder / group / f"{typed_words.get(group)}.yaml"
            if file.exists():
                preset = files.read_yaml(file)
                values |= flat(preset if group in preset else {group: preset})
    return [f"{key}={as_typed(value)}" for key, value in values.items() if value != {}]


def combinations(words: Sequence[str], config_dir: str | None) -> list[tuple[list[str], TrainConfig]]:
    """The runs of a sweep in Hydra's order: the words in which each differs from the others, and its settings. Raises
    UserError.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(overrides("train", words, sweep=True)[1])
        choices = [
            [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
            if each.is_discrete_sweep()
            else [f"{each.get_key_element()}={each.get_value_element_as_str()}"]
            for each in parsed
        ]
    except HydraException as error:
        raise explained(error) from error
    jobs = [*product(*choices)]
    common = set.intersection(*map(set, jobs))
    return [([w for w in job if w not in common], settings("train", job, config_dir)) for job in jobs]


def demo_folder() -> str:
    """`${demo:}`: the folder of the demo set."""
    from clipscale.tools.data.demo import user_folder

    return str(user_folder())


# Around a value: a second equals sign, and the quotes of a word processor.
MISPLACED = "= \u201c\u201d\u2018\u2019"


with warnings.catch_warnings(action="ignore"):  # of what Hydra 1.5 and the OmegaConf after 2.4 will change
    OmegaConf.register_new_resolver("demo", demo_folder, replace=True)
    OmegaConf.register_new_resolver("oc.env", from_environment, replace=True)


def explained(error: Exception) -> UserError:
    """One line for an error of Hydra or OmegaConf."""
    text = " ".join(str(error).split())
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = str(error.missing_cfg_file).partition("/")
        options = error.options or []
        meant = MEANT.get(f"{group}={choice}", choice.lower())
        text = f"{group}={choice}: unknown; choose {one_of(options)}{nearest(meant, options)}"
        if group == "data":
            text += "; shards are given by data.train=PATH"
    elif isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        text = f"{error.override}: cannot be read; write {key}={value.strip(MISPLACED)}, in plain quotes if need be"
    elif several := re.search(r"Ambiguous value for argument '((.*?)=(.*?))' 1\.", text):
        word, key, value = several.groups()
        text = f"{word}: several values; add -m for a sweep, or write '{key}=[{value}]' for a list"
    elif ours := re.search(r"UserError raised while resolving interpolation: (.*?)(?: full_key:|$)", text):
        text = ours[1]
    return UserError(text)
