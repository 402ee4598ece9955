"""The words of a command line: checked against the declared settings before Hydra is imported, then quoted for it.

Importing Hydra takes longer than all else on the way to an error message.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from clipscale.cli.verbs import Tool
from clipscale.common.errors import UserError
from clipscale.common.units import nearest, one_of, split
from clipscale.config.checks import check_value
from clipscale.config.parse import converted, misnamed
from clipscale.config.presets import composed_defaults, group_options
from clipscale.config.renamed import current
from clipscale.config.setting import settings_of

MULTIRUN = ("-m", "--multirun")
SWITCHES = (*MULTIRUN, "--resolve", "--hydra-help", "--info", "-i")
CONFIG_DIR = ("--config-dir", "-cd")
VALUED = ("--cfg", "-c", "--package", "-p", *CONFIG_DIR, "--config-name", "-cn")
"""Hydra's flags that are passed on: SWITCHES have no value, VALUED have one."""
CFG = ("job", "hydra", "all")
"""Values of `--cfg`: which part of the composed configuration Hydra prints."""
WORDS = {"null": None, "true": True, "false": False}


def prepare(tool: Tool, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags and overrides as Hydra wants them, with current names.

    Literal values are quoted, free-form dictionaries accept new keys, and of `samples` and `epochs` the one that is not given becomes
    null. Raises UserError for flags, keys and values that are wrong whatever Hydra composes from the files in conf/.
    """
    flags, overrides = separate(argv)
    sweep = any(flag in MULTIRUN for flag in flags)
    own_files = any(flag.partition("=")[0] in CONFIG_DIR for flag in flags)
    settings = {one.name: one for one in settings_of(tool.settings)}
    dictionaries = tuple(f"{name}." for name, one in settings.items() if one.kind is dict)
    groups, options = composed_defaults(tool.file)[0], group_options()
    result, given = [], set()
    for word in overrides:
        typed, equals, value = word.partition("=")
        prefix = typed[: len(typed) - len(typed.lstrip("+~"))]
        key = current(typed.lstrip("+~"), settings)
        if key == "data" and "data.train" in settings and is_source(value, options["data"]):
            key = "data.train"
        given.add(key)
        if word.startswith("~") and key in settings:
            raise UserError(f"{word}: a setting cannot be taken away; give it another value")
        if key in groups and equals:
            for name in [] if own_files else parts(key, value, sweep):
                if name not in [*options[key], "null"] and not complex_value(name):
                    raise UserError(
                        f"{key}={name}: unknown; choose {one_of(options[key])}{nearest(name, options[key])}"
                    )
        elif key in settings and equals:
            if settings[key].literal:
                value = literal(key, value, sweep)
            else:
                for text in parts(key, value, sweep):
                    if not complex_value(text):
                        check_value(settings[key], converted(settings[key], read_value(text)))
            if key == "run" and value and not complex_value(value):
                tool.find_run(str(read_value(value)))
        elif not (key in groups or key.startswith(dictionaries) or own_files or re.match(r"hydra\b|.*[@/]", key)):
            raise UserError(misnamed(key, [name for name in (*options, *settings) if name != key]))
        result.append(f"{'++' if f'{key}.'.startswith(dictionaries) else prefix}{key}{equals}{value}")
    for one, other in (("samples", "epochs"), ("epochs", "samples")):
        if one in given and other not in given and other in settings:
            result.append(f"{other}=null")
    return flags, result


def is_source(text: str, presets: Sequence[str]) -> bool:
    """Whether `data=TEXT` names shards, a table or a folder, and no preset."""
    address = re.search(r"[/*{@]|\.(tar|csv|tsv|parquet)\b", text) is not None
    return text not in presets and (address or os.path.exists(text))  # noqa: PTH110 (False for a text that no file can be named)


def parts(key: str, text: str, sweep: bool) -> list[str]:
    """The values of a sweep, or the only one. Raises UserError for several values without a sweep."""
    found = split(text) or [""]
    if len(found) > 1 and not sweep:
        raise UserError(several(key, text))
    return found


def several(key: str, text: str) -> str:
    """The message for several values where one is wanted."""
    return f"{key}={text}: several values; add -m to run them one after another, or write {key}=[{text}] for a list"


def complex_value(text: str) -> bool:
    """Whether only Hydra can read the text: an interpolation, a function, a dictionary, or brackets that do not match."""
    return "${" in text or re.match(r"\w+\(|\{", text) is not None or text.count("[") != text.count("]")


def read_value(text: str) -> Any:
    """The value that Hydra reads from a text: null, a truth value, a number, a list, or the text itself."""
    if text[:1] in ("'", '"') and text[-1:] == text[:1]:
        return text[1:-1]
    if text.startswith("[") and text.endswith("]"):
        return [read_value(part) for part in split(text[1:-1])]
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def separate(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags and overrides apart. Raises UserError for an unknown flag, or a word that is neither."""
    flags: list[str] = []
    overrides: list[str] = []
    for word in argv:
        if flags and flags[-1] in VALUED:
            flags.append(word)
        elif word.startswith("-"):
            name = word.partition("=")[0]
            if name not in SWITCHES + VALUED:
                raise UserError(f"{word}: unknown flag{nearest(name, SWITCHES + VALUED)}")
            flags.append(word)
        elif word.partition("=")[0] and ("=" in word or word.startswith("~")):
            overrides.append(word)
        else:
            raise UserError(f"{word}: give settings as KEY=VALUE")
    if flags and flags[-1] in VALUED:
        raise UserError(f"{flags[-1]} needs a value")
    for flag, value in pairwise(flag for word in flags for flag in word.split("=", 1)):
        if flag in ("--cfg", "-c") and value not in CFG:
            raise UserError(f"{flag} {value}: choose {one_of(CFG)}")
    return flags, overrides


FUNCTION = re.compile(r"(choice|shuffle|sort|glob|extend_list|str)\(")
"""Of Hydra's grammar, for a sweep over texts. A name or path may have brackets, too."""


def literal(key: str, value: str, sweep: bool) -> str:
    """A literal value in Hydra's grammar: quoted; in a list `[a,b]` or a sweep `a,b`, each element on its own."""
    if value in ("", "null") or value[0] in "'\"" or value.startswith("${") or (sweep and FUNCTION.match(value)):
        return value
    if value.startswith("[") and value.endswith("]"):
        return f"[{','.join(map(quoted, split(value[1:-1])))}]"
    return ",".join(map(quoted, parts(key, value, sweep)))


def quoted(text: str) -> str:
    """A text in quotes, unless it has some or is null."""
    if text[0] in "'\"" or text == "null":
        return text
    return "'" + text.replace("'", "\\'") + "'"
