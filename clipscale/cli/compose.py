"""The settings of a verb from the command line: Hydra composes the dataclasses, conf/ and the overrides.

Every mistake becomes a UserError of one line.
"""

import itertools
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clipscale.cli.verbs import VERBS, Verb
from clipscale.common.errors import UserError
from clipscale.common.units import nearest, one_of, split
from clipscale.config.parse import MEANT, as_typed, misnamed, typed
from clipscale.config.presets import conf_dir, group_options
from clipscale.config.secrets import from_environment
from clipscale.config.setting import flat, settings_of
from clipscale.config.train import TrainConfig


class Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        flag = re.search(r"arguments: --?([\w-]+)", message)
        meant = MEANT.get(flag[1].replace("-", "_"), "KEY=VALUE") if flag else ""
        remedy = f"; settings have no dashes: {meant}{'=...' * ('=' not in meant)}" if flag else ""
        raise UserError(message + remedy)


def parse(argv: Sequence[str]) -> Namespace:
    """Flags (multirun, cfg, config_dir) and `words`: settings, and plain words such as shards. Raises UserError."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config-dir")
    parser.add_argument("words", nargs="*")
    return parser.parse_intermixed_args(argv)


def overrides(name: str, words: Iterable[str], *, sweep: bool = False) -> tuple[list[str], list[str]]:
    """The plain words of a verb that takes some, and the others as Hydra's overrides. Raises UserError.

    Texts such as paths are quoted, dictionaries accept new keys, and of `samples` and `epochs` the one that is not
    given becomes null.
    """
    declared = {setting.name: setting for setting in settings_of(VERBS[name].settings)}
    dictionaries = tuple(f"{key}." for key, setting in declared.items() if setting.kind is dict)
    plain: list[str] = []
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if VERBS[name].words and not (equals and re.fullmatch(r"[a-z_.]+", key)):
            plain.append(word)
            continue
        if not (key and equals):
            raise UserError(f"{word}: give settings as KEY=VALUE{example(word, [*declared, *group_options()])}")
        if key == "data" and "data.train" in declared and is_source(value):
            key = "data.train"
        if key in declared and declared[key].kind in (str, list) and key != "stages":
            value = quoted_values(value, sweep=sweep)
        if value.endswith(","):
            raise UserError(f"{word}: nothing follows the comma; leave it out")
        override = key
        if key.startswith(dictionaries):
            override = f"++{key}"  # a new key
        if override in given:
            raise UserError(f"{key} is given twice; quote a value with braces, which the shell splits: {key}='...'")
        given[override] = value
    if given.keys() & {"samples", "epochs", "stages"} and "epochs" in declared:  # an experiment's own counts less
        given.setdefault("samples", "null")
        given.setdefault("epochs", "null")
    return plain, [f"{key}={value}" for key, value in given.items()]


def example(word: str, names: Collection[str]) -> str:
    """What was probably meant by a word without an equals sign."""
    if word.endswith((".yaml", ".yml")):
        return "; settings of a file: --config-dir DIR experiment=NAME takes DIR/experiment/NAME.yaml"
    if word in names:
        return f", {word}=..."
    return f", as in run={word}" if "run" in names and word.isalnum() else ""


def is_source(text: str) -> bool:
    """Whether `data=TEXT` names shards or a folder, and no preset."""
    return text not in group_options()["data"] and (re.search(r"[/*{@.[]", text) is not None or Path(text).exists())


def quoted_values(text: str, *, sweep: bool) -> str:
    """A text in quotes, since braces and colons mean something to Hydra; each part of a list `[a,b]` or sweep `a,b`."""

    def quoted(part: str) -> str:
        special = part == "null" or part[0] in "'\"" or part.startswith("${")
        return part if special else "'" + part.replace("'", "\\'") + "'"

    if text.startswith("[") and text.endswith("]"):
        return f"[{','.join(map(quoted, split(text[1:-1])))}]"
    return ",".join(map(quoted, split(text))) if sweep else text and quoted(text)


def settings(name: str, words: Sequence[str], config_dir: str | None = None) -> Any:
    """The settings of a verb: its defaults, conf/ and Hydra's overrides `words`. Raises UserError for any mistake."""
    verb = VERBS[name]
    if config_dir and not Path(config_dir).is_dir():
        raise UserError(f"--config-dir {config_dir}: there is no such folder; it holds experiment/NAME.yaml")
    ConfigStore.instance().store(name="settings", node=asdict(verb.settings()))
    names = {setting.name for setting in settings_of(verb.settings)}
    trains = {setting.name for setting in settings_of(TrainConfig)}
    for key in (word.partition("=")[0] for word in words):
        if key in MEANT and key not in names:
            raise UserError(misnamed(key, {*names, *group_options()}))
        if any_of(trains, key) and not any_of(names, key):
            raise UserError(f"{key}: {name} does not use it; `clipscale {name} --help` lists what it uses")
    path = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            words = [*beside_experiment(words, config_dir), *words, *path]
            tree: Any = OmegaConf.to_container(compose(verb.conf or "settings", words), resolve=True)
    except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        raise explain(error, verb) from error
    return typed(verb.settings, without(tree, trains - names))  # of presets, such as those of training in data=demo


def any_of(names: Iterable[str], key: str) -> bool:
    """Whether a key is among the names, or a section or group of them."""
    return any(name == key or name.startswith(f"{key}.") for name in names)


def without(tree: dict[str, Any], keys: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Nested values without those of the dotted `keys`, and without sections that hold nothing else."""
    kept = {}
    for name, value in tree.items():
        key = prefix + name
        inner = without(value, keys, f"{key}.") if isinstance(value, dict) else value
        if key not in keys and not (value and inner == {}):
            kept[name] = inner
    return kept


def beside_experiment(words: Sequence[str], config_dir: str | None) -> list[str]:
    """The values of presets of optimizer and loss that are given beside an experiment, whose own count less.

    Raises UserError for a `model` beside an experiment that describes its own: half of each would be neither.
    """
    given = dict(word.split("=", 1) for word in words)

    def values(group: str) -> dict[str, Any]:
        files = [Path(folder) / group / f"{given.get(group)}.yaml" for folder in (config_dir, conf_dir()) if folder]
        file = next((file for file in files if file.exists()), None)
        return (file and yaml.safe_load(file.read_text(encoding="utf-8"))) or {}

    experiment, loss = values("experiment"), values("loss")
    if "model" in given and {"name", "architecture"} & experiment.get("model", {}).keys():
        raise UserError(f"model={given['model']}: experiment={given['experiment']} has its own; leave out one of them")
    presets = ({"optim": values("optim")}, loss if "loss" in loss else {"loss": loss}) if experiment else ()
    return [f"{key}={as_typed(value)}" for preset in presets for key, value in flat(preset) if value != {}]


def combinations(words: Sequence[str], config_dir: str | None) -> list[tuple[list[str], TrainConfig]]:
    """Every combination of the values of a sweep, and its settings, in Hydra's order: the last varies fastest. Raises
    UserError.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(overrides("train", words, sweep=True)[1])
    except HydraException as error:
        raise explain(error, VERBS["train"]) from error
    fixed = [str(override.input_line) for override in parsed if not override.is_sweep_override()]
    varied = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        for override in parsed
        if override.is_sweep_override()
    ]
    return [(list(c), settings("train", [*fixed, *c], config_dir)) for c in itertools.product(*varied)]


def demo_path(part: str) -> str:
    """`${demo:train}` and similar: a part of the demo set in the user's cache folder."""
    from clipscale.tools.data.demo import paths

    return paths().train if part == "train" else str(paths().tests[part])


OmegaConf.register_new_resolver("demo", demo_path, replace=True)
OmegaConf.register_new_resolver("oc.env", from_environment, replace=True)


def explain(error: Exception, verb: Verb) -> UserError:
    """One line for an error of Hydra or OmegaConf: the setting, and the nearest valid names."""
    names = [*group_options(), *(setting.name for setting in settings_of(verb.settings))]
    cause: BaseException | None = error
    while cause is not None:
        text = " ".join(str(cause).split())
        if ours := re.search(r"UserError raised while resolving interpolation: (.*?)(?: full_key:|$)", text):
            return UserError(ours[1])
        if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
            group, _, choice = str(cause.missing_cfg_file).partition("/")
            options = list(group_options().get(group, cause.options or []))
            likely = nearest(MEANT.get(f"{group}={choice}", choice.lower()), options)
            shards = ", or give shards, data.train=PATH" * (group == "data")
            return UserError(f"{group}={choice}: unknown; choose {one_of(options)}{shards}{likely}")
        if isinstance(cause, OverrideParseException):
            return UserError(f"{cause.override}: cannot be read ({cause.message.splitlines()[0].rstrip('.')})")
        if several := re.search(r"Ambiguous value for argument '(.*?)' 1\.", text):
            key, _, value = several[1].partition("=")
            return UserError(f"{several[1]}: several values; add -m for a sweep, or write {key}=[{value}] for a list")
        if unknown := re.search(r"Could not (?:override|delete|append to config)[^']*'([^']+)'", text):
            return UserError(misnamed(unknown[1], [name for name in names if name != unknown[1]]))
        cause = cause.__cause__
    return UserError(" ".join(str(error).split()))
