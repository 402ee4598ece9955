"""The words of a command line: its flags, and its settings as Hydra's overrides, with texts such as paths in quotes.

Every mistake becomes a UserError of one line.
"""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser, create_functions
from hydra.errors import HydraException

from clipscale.cli.verbs import FLAGS, VERBS
from clipscale.common.errors import UserError
from clipscale.common.terminal import is_main_rank, print_line
from clipscale.common.text import did_you_mean
from clipscale.config.parse import ABSENT, ALIASES, unknown_key
from clipscale.config.presets import default_choices, group_options
from clipscale.config.setting import settings_of

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


def parse_flags(name: str, argv: Sequence[str]) -> Namespace:
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


def overrides_of(name: str, words: Iterable[str], *, sweep: bool = False) -> tuple[list[str], list[str]]:
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
