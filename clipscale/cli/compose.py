"""Words of the command line in, the settings of a verb out: Hydra composes them from the dataclasses, conf/ and the
overrides.

Every mistake becomes a UserError of one line.
"""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from clipscale.cli.verbs import TOOLS, Tool
from clipscale.common.errors import UserError
from clipscale.common.units import nearest, one_of, split
from clipscale.config.parse import misnamed, typed
from clipscale.config.presets import conf_dir, group_options
from clipscale.config.secrets import from_environment
from clipscale.config.setting import flat, settings_of


class Words(Namespace):
    """A command line after its verb."""

    words: list[str]
    """Settings, and plain words such as shards."""
    multirun: bool
    cfg: str | None
    config_dir: str | None


class Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse(argv: Sequence[str]) -> Words:
    """Flags and words apart. Raises UserError for an unknown flag."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config-dir")
    parser.add_argument("words", nargs="*")
    return parser.parse_intermixed_args(argv, Words())


def overrides(name: str, words: Iterable[str], *, sweep: bool = False) -> tuple[list[str], list[str]]:
    """The plain words of a tool that takes some, and the others as Hydra's overrides.

    Texts such as paths are quoted, dictionaries accept new keys, and of `samples` and `epochs` the one that is not
    given becomes null.
    """
    tool, plain, result = TOOLS[name], [], []
    settings = {setting.name: setting for setting in settings_of(tool.settings)}
    dictionaries = tuple(f"{key}." for key, setting in settings.items() if setting.kind is dict)
    sections = {key.partition(".")[0] for key in settings}
    for word in words:
        key, equals, value = word.partition("=")
        if tool.words and not (key.partition(".")[0] in sections or (equals and re.fullmatch(r"[a-z_.]+", key))):
            plain.append(word)
            continue
        if not (key and (equals or word.startswith("~"))):
            raise UserError(f"{word}: give settings as KEY=VALUE")
        if key == "data" and "data.train" in settings and is_source(value):
            key = "data.train"
        if key in settings and settings[key].is_text:
            value = quoted_values(value, sweep=sweep)
        result.append(f"{'++' * key.startswith(dictionaries)}{key}{equals}{value}")
    given = {word.partition("=")[0] for word in result}
    for length, other in (("samples", "epochs"), ("epochs", "samples")):
        if length in given and other not in given and other in settings:
            result.append(f"{other}=null")
    return plain, result


def is_source(text: str) -> bool:
    """Whether `data=TEXT` names shards, a table or a folder, and no preset."""
    return text not in group_options()["data"] and (re.search(r"[/*{@.]", text) is not None or Path(text).exists())


def quoted_values(text: str, *, sweep: bool) -> str:
    """A text in quotes, since braces and colons mean something else to Hydra; in a list `[a,b]` and a sweep `a,b` each
    part on its own.
    """

    def quoted(part: str) -> str:
        special = part == "null" or part[0] in "'\"" or part.startswith("${")
        return part if special else "'" + part.replace("'", "\\'") + "'"

    if text.startswith("[") and text.endswith("]"):
        return f"[{','.join(map(quoted, split(text[1:-1])))}]"
    return ",".join(map(quoted, split(text))) if sweep else text and quoted(text)


def values(name: str, words: Sequence[str], config_dir: str | None = None, *, with_hydra: bool = False) -> DictConfig:
    """The composed configuration. `with_hydra`: with Hydra's own part. Raises UserError for whatever Hydra refuses."""
    tool = TOOLS[name]
    ConfigStore.instance().store(name="settings", node=asdict(tool.settings()))
    file = name if (conf_dir() / f"{name}.yaml").exists() else "settings"
    path = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return compose(file, [*words, *path], return_hydra_config=with_hydra)
    except (HydraException, OmegaConfBaseException, ValueError, YAMLError) as error:
        raise explain(error, tool) from error


def resolved(name: str, config: DictConfig) -> Any:
    """The settings of a tool from its composed configuration. Raises UserError for a wrong value."""
    tool = TOOLS[name]
    try:
        tree: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise explain(error, tool) from error
    return typed(tool.settings, tree)


def defaults(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The defaults of a tool by dotted key, and the preset of each of its groups that they come from."""
    config = values(name, [], with_hydra=True)
    choices = {group: choice for group, choice in config.hydra.runtime.choices.items() if group in group_options()}
    tree: Any = OmegaConf.to_container(config)
    return {setting.name: setting.default for setting in settings_of(TOOLS[name].settings)} | dict(flat(tree)), choices


def as_yaml(config: DictConfig) -> str:
    """What `--cfg job` prints: the composed configuration, with its interpolations as they are."""
    return OmegaConf.to_yaml(config)


def parsed(words: Sequence[str], tool: Tool) -> list[Override]:
    """The overrides as Hydra reads them. Raises UserError."""
    try:
        return OverridesParser.create().parse_overrides(list(words))
    except HydraException as error:
        raise explain(error, tool) from error


def demo_path(part: str) -> str:
    """`${demo:train}` and similar: a part of the demo set in the user's cache folder."""
    from clipscale.data.tools.demo import paths

    return paths().train if part == "train" else str(paths().tests[part])


OmegaConf.register_new_resolver("demo", demo_path, replace=True)
OmegaConf.register_new_resolver("oc.env", from_environment, replace=True)


def explain(error: Exception, tool: Tool) -> UserError:
    """One line for an error of Hydra or OmegaConf: the setting, and the nearest valid names."""
    names = [*group_options(), *(setting.name for setting in settings_of(tool.settings))]
    cause: BaseException | None = error
    while cause is not None:
        text = " ".join(str(cause).split())
        if ours := re.search(r"UserError raised while resolving interpolation: (.*?)(?: full_key:|$)", text):
            return UserError(ours[1])
        if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
            group, _, choice = str(cause.missing_cfg_file).rpartition("/")
            options = list(cause.options or group_options().get(group, []))
            return UserError(f"{group}={choice}: unknown; choose {one_of(options)}{nearest(choice, options)}")
        if isinstance(cause, OverrideParseException):
            return UserError(f"{cause.override}: cannot be read ({cause.message.splitlines()[0].rstrip('.')})")
        if several := re.search(r"Ambiguous value for argument '(.*?)' 1\.", text):
            key, _, value = several[1].partition("=")
            return UserError(f"{several[1]}: several values; add -m for a sweep, or write {key}=[{value}] for a list")
        if unknown := re.search(r"Could not (?:override|delete|append to config)[^']*'([^']+)'", text):
            return UserError(misnamed(unknown[1], [name for name in names if name != unknown[1]]))
        cause = cause.__cause__
    return UserError(" ".join(str(error).split()))
