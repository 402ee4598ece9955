"""The settings of a verb from the command line: Hydra composes the dataclasses, conf/ and the overrides.

Every mistake becomes a UserError of one line.
"""

import re
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser, create_functions
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clipscale.cli.verbs import FLAGS, VERBS
from clipscale.common import files, ranks
from clipscale.common.errors import UserError
from clipscale.common.terminal import is_main_rank, print_line
from clipscale.common.text import did_you_mean, one_of
from clipscale.config.parse import ABSENT, ALIASES, as_typed, dataclass_from, is_known_key, removal_message, unknown_key
from clipscale.config.presets import conf_dir, default_choices, group_options
from clipscale.config.secrets import from_environment
from clipscale.config.setting import flat, settings_of
from clipscale.config.train_config import TrainConfig, has_logit_bias
from clipscale.models.weights.sources import resolve_architecture
from clipscale.run_folder.paths import run_folder, run_to_resume

QUOTES = "'\""
# Behave as this version of Hydra.
VERSION = "1.3"
# The exceptions of Hydra and OmegaConf for wrong words and presets.
HYDRA_ERRORS = (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError)
# Words that users type for a section, and the setting that they mean.
SECTION_ALIASES = {"holdout": "holdout.share"}
# A text inside a value that Hydra reads: quoted, or up to the next comma or bracket that is not inside braces, quotes,
# or brackets within a word (`/data/[0-9].tar`). The lists and sweeps around it are Hydra's.
TEXT = re.compile(
    r"""(["'])(?:\\.|(?!\1).)*\1
    | (?:\{(?:[^{}]|\{[^{}]*\})*\} | \[[^][]*\](?=[^],\s]) | [^][,\s])
      (?:\{(?:[^{}]|\{[^{}]*\})*\} | \[[^][]*\] | "[^"]*" | '[^']*' | [^][,])*""",
    re.VERBOSE,
)
FUNCTION = re.compile(rf"({'|'.join(create_functions().functions)})\(.*\)")


# The end of the message about an unknown flag.
REMEDY = "settings are KEY=VALUE; page 'Moving from open_clip' has its flags"


class Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}{did_you_mean(message.rpartition(' ')[2], FLAGS)}; {REMEDY}")


def parse(name: str, argv: Sequence[str]) -> Namespace:
    """Flags (FLAGS) and `words` of a verb: settings, and plain words such as shards.

    Raises UserError.
    """
    unknown = [word for word in argv if re.match(r"--\w", word) and word.partition("=")[0] not in FLAGS]
    if unknown:
        answers = dict.fromkeys(answer_to_flag(name, word) for word in unknown)
        raise UserError(f"{' '.join(unknown)}: {'; '.join(answers)}; {REMEDY}")
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--config-dir")
    parser.add_argument("words", nargs="*")
    return parser.parse_intermixed_args(argv)


def answer_to_flag(name: str, flag: str) -> str:
    """The answer to a flag that a verb does not have, from the setting of the same name."""
    key = flag.lstrip("-").partition("=")[0].replace("-", "_")
    names = [*settings_of(VERBS[name].settings), *default_choices(VERBS[name].conf)]
    if key in names:
        return f"write {key}=..."
    meant = did_you_mean(flag, FLAGS)
    return (
        f"unknown flag{meant}"
        if meant and key not in {*ALIASES, *ABSENT["open_clip"]}
        else unknown_key(key, names, name)
    )


def overrides(name: str, words: Iterable[str], *, sweep: bool = False) -> tuple[list[str], list[str]]:
    """The plain words, for a verb that takes some, and all other words as Hydra's overrides. Raises UserError.

    Quotes texts such as paths. If only one of `samples` and `epochs` is typed, the other becomes null.
    """
    verb = VERBS[name]
    declared = settings_of(verb.settings)
    lists = {key for key, setting in declared.items() if setting.kind is list}
    sections = {key for key, setting in declared.items() if setting.item_type}
    texts = lists - sections | {key for key, setting in declared.items() if setting.kind is str}
    groups = default_choices(verb.conf)
    plain = []
    values: dict[str, str] = {}
    before = ""
    for word in words:
        if verb.plain_words and not re.match(r"\+*[a-z_.]+=", word):
            plain.append(word)
            continue
        check_word(name, word)
        key, value = key_and_value(word)
        if values.get(key, value) != value:
            check_repeated(key, values[key], value, braces=before == key and (sweep or key in lists), sweep=sweep)
        values[key] = value
        before = key
    if "epochs" in declared and values.keys() & {"samples", "epochs", "stages"}:
        values.setdefault("samples", "null")  # a typed length replaces an experiment's, in any unit
        values.setdefault("epochs", "null")
    for key, value in values.items():
        if key in texts or (key in groups and (sweep or "," not in value)):
            values[key] = quote_values(key, value, sweep=sweep)
    return plain, [f"{key}={value}" for key, value in values.items()]


def key_and_value(word: str) -> tuple[str, str]:
    """The parts of KEY=VALUE. Short forms of a key are written out, such as `data=` for `data.train=`."""
    key, _, value = word.lstrip("+").partition("=")
    if key == "data" and value not in group_options()["data"]:
        names_shards = re.search(r"[/*{@.[]", value) or Path(value).exists()
        key = "data.train" if names_shards else key
    return SECTION_ALIASES.get(key, key), value


def is_hydra_setting(word: str) -> bool:
    """Whether the word is a setting of Hydra's own, such as `hydra/launcher=joblib`."""
    return bool(re.match(r"\+*hydra[./]", word))


def check_word(name: str, word: str) -> None:
    """Raise UserError for a word that is not a setting of this verb."""
    key, equals, value = word.lstrip("+").partition("=")
    words = VERBS[name].plain_words
    if not (key and equals):
        raise UserError(
            f"{word}: give settings as KEY=VALUE, as in {word}=... or run={word}; a file of them: --config-dir DIR "
            "experiment=NAME"
        )
    if is_hydra_setting(word):
        raise UserError(f"{word}: only a sweep takes Hydra's launchers and sweepers, clipscale train -m {word} ...")
    if key in ("data", "data.train") and words:
        raise UserError(f"{word}: {name} takes {words} as plain words: clipscale {name} {value}")


def check_repeated(key: str, value: str, later: str, *, braces: bool, sweep: bool) -> None:
    """Print that the last one of a key's two values counts.

    `braces`: a shell may have made both from one value with braces. Then raises UserError if they also look like that:
    they begin or end alike, and have no comma. The words of a script and what is typed after them rarely do.
    """
    earlier = value.strip("[]")
    other = later.strip("[]")
    alike = earlier[:1] == other[:1] or earlier[-1:] == other[-1:]
    if braces and alike and "," not in earlier + other:
        several = f"; values of a sweep are {key}={value},{later}" if sweep else ""
        raise UserError(
            f"{key} is given twice in a row, {value} and {later}, as a shell makes it of braces; quote them, "
            f"{key}='...'{several}"
        )
    if is_main_rank():
        print_line(f"{key}={later} counts, the last one, and not {key}={value} before it", error=True)


def quote_values(key: str, text: str, *, sweep: bool) -> str:
    """The value with its texts in quotes: braces, colons and numbers mean something to Hydra.

    A list stays a list, and in a `sweep` several values stay several. What Hydra cannot read so becomes one text.
    """
    if sweep and FUNCTION.fullmatch(text):
        return text
    if not (sweep or text.startswith("[")):
        return quote(text)
    values = TEXT.sub(lambda match: quote(match[0].strip()), text)
    try:
        OverridesParser.create().parse_override(f"{key}={values}")
    except HydraException:
        return quote(text)
    return values


def quote(text: str) -> str:
    """A text in quotes, if it is not null, quoted, or an interpolation."""
    if text in ("", "null") or text.startswith(("'", '"', "${")):
        return text
    return "'" + text.replace("'", "\\'") + "'"


def settings(name: str, words: Sequence[str], config_dir: str | None = None, *, in_sweep: str = "") -> Any:
    """The settings of a verb: its defaults, conf/ and Hydra's overrides `words`. Raises UserError for any mistake.

    `in_sweep`: the name of the run's folder in its sweep's folder.
    """
    verb = VERBS[name]
    if config_dir and not Path(config_dir).is_dir():
        raise UserError(f"--config-dir {config_dir}: there is no such folder; it holds experiment/NAME.yaml")
    declared = settings_of(verb.settings)
    trains = settings_of(TrainConfig)
    groups = default_choices(verb.conf)
    changes = values_of_presets(words, config_dir)
    for word in words:
        key, _, value = word.partition("=")
        if gone := removal_message(f"{key}={value.strip(QUOTES)}", name):
            raise UserError(gone)
        if is_in_dictionary(key, verb.settings):
            word = f"++{word}"  # new keys
        elif key not in declared and key not in groups:
            meant = ALIASES.get(key, key).partition("=")[0]
            if is_known_key(trains, meant) and not is_known_key(declared, meant):
                raise UserError(f"{key}: {name} does not use it; `clipscale {name} --help` lists what it uses")
            raise UserError(unknown_key(key, [*declared, *groups], name))
        changes.append(word)
    if config_dir:
        changes.append(f"hydra.searchpath=[file://{Path(config_dir).resolve()}]")
    try:
        tree: Any = OmegaConf.to_container(compose_config(name, changes), resolve=True)
    except HYDRA_ERRORS as error:
        raise one_line_error(error) from error
    # Presets may set what this verb does not use, such as settings of training in data=demo.
    values = dataclass_from(verb.settings, tree, ignored=trains.keys() - declared)
    if not hasattr(values, "model"):
        return values
    chosen = any(re.match(r"[+]*model(\.name|\.architecture.*)?=", word) for word in words)
    resumed = None
    needs_bias = False
    if isinstance(values, TrainConfig):
        needs_bias = has_logit_bias(values)
        folder = run_folder(values.run) / in_sweep if values.run and in_sweep else values.run
        resumed = run_to_resume(str(folder), values.resume, own_first=bool(in_sweep) or ranks.is_restarted())
    return replace(
        values, model=resolve_architecture(values.model, chosen=chosen, needs_bias=needs_bias, resumed=resumed)
    )


def compose_config(name: str, changes: Sequence[str], *, with_own: bool = False) -> DictConfig:
    """A verb's defaults, conf/ and overrides, composed by Hydra. `with_own`: also Hydra's own settings, under `hydra`.
    Raises HYDRA_ERRORS."""
    verb = VERBS[name]
    node = asdict(verb.settings(), dict_factory=with_lists)
    with warnings.catch_warnings(action="ignore"), initialize_config_dir(str(conf_dir()), version_base=VERSION):
        ConfigStore.instance().store(name="settings", node=node)
        return compose(verb.conf or "settings", list(changes), return_hydra_config=with_own)


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
                values |= flat(preset if group in preset else {group: preset})
    return [f"{key}={as_typed(value)}" for key, value in values.items() if value != {}]


def demo_folder() -> str:
    """`${demo:}`: the folder of the demo set."""
    from clipscale.tools.data.demo_folder import user_folder

    return str(user_folder())


with warnings.catch_warnings(action="ignore"):  # about changes in Hydra 1.5 and after OmegaConf 2.4
    OmegaConf.register_new_resolver("demo", demo_folder, replace=True)
    OmegaConf.register_new_resolver("oc.env", from_environment, replace=True)


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
