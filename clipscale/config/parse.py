"""Turns plain values, as YAML and the command line give them, into settings. Checks types, choices and bounds once.

Every mistake is a UserError of one line that names the setting.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from enum import Enum
from operator import ge, gt, le, lt
from pathlib import Path
from typing import TypedDict, TypeVar, cast, get_args

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.text import did_you_mean, one_of
from clipscale.common.units import Bytes, parse_bytes, parse_count
from clipscale.config.setting import Setting, sections_of, settings_of

T = TypeVar("T")


class Absent(TypedDict):
    """Words that are not settings here, with what to do instead."""

    # Words of open_clip -> what to do instead.
    open_clip: dict[str, str]
    # Version -> the words that it removed, with what to do instead.
    removed: dict[str, dict[str, str]]


# Words of open_clip and of other programs -> our setting or preset.
ALIASES: dict[str, str] = files.read_yaml(Path(__file__).parent / "aliases.yaml")
ABSENT: Absent = files.read_yaml(Path(__file__).parent / "absent.yaml")
# Type of numbers -> the function that reads its texts.
NUMBER_PARSERS: dict[object, Callable[[str], int]] = {int: parse_count, Bytes: parse_bytes}
Bound = Callable[[float, float], bool]
BOUNDS: dict[str, tuple[Bound, str]] = {
    "least": (ge, "at least"),
    "above": (gt, "more than"),
    "below": (lt, "less than"),
    "most": (le, "at most"),
}


def dataclass_from(
    settings_type: type[T], values: Mapping[str, object], prefix: str = "", ignored: Iterable[str] = ()
) -> T:
    """Plain nested values as the dataclass `settings_type`, with defaults for the rest. Raises UserError.

    `prefix`: stands before names in messages. `ignored`: names that are allowed though they are not settings here.
    """
    settings = settings_of(settings_type, prefix)

    def build(section: type, values: Mapping[str, object], prefix: str) -> object:
        subsections = sections_of(section)
        arguments: dict[str, object] = {}
        for name, value in values.items():
            key = f"{prefix}{name}"
            if name in subsections and isinstance(value, dict):
                arguments[name] = build(subsections[name], value, f"{key}.")
            elif key in settings:
                arguments[name] = accepted_value(settings[key], value)
            elif not is_known_key(ignored, key):
                raise UserError(unknown_key(key, settings))
        built = section(**arguments)
        if hasattr(built, "check"):
            built.check()
        return built

    return cast(T, build(settings_type, values, prefix))


def list_of_dataclasses(settings_type: type, key: str, values: Iterable[object]) -> list[object]:
    """The items of the list `key`, each as the dataclass `settings_type`. Raises UserError."""
    names = [field.name for field in fields(settings_type)]
    built: list[object] = []
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict) or value.keys() - set(names):
            raise UserError(f"{key}: {number}. is {as_typed(value)}; give it some of {', '.join(names)}")
        built.append(dataclass_from(settings_type, value, f"{key}: {number}. "))
    return built


def accepted_value(setting: Setting, value: object) -> object:
    """A value as the setting's type, if it is one of its choices and within its bounds. Raises UserError."""
    if value is None and setting.is_optional:
        return None
    key = setting.name
    result = converted_value(setting, value)
    if setting.choices and result not in setting.choices:
        meant = ALIASES.get(f"{key}={result}", str(result))
        removal = removal_message(f"{key}={result}")
        raise UserError(
            removal or f"{key}={result}: choose {one_of(setting.choices)}{did_you_mean(meant, setting.choices)}"
        )
    values = result if isinstance(result, tuple | list) else [result]
    numbers = cast("list[float]", values)
    for name, bound in setting.bounds.items():
        holds, words = BOUNDS[name]
        if not all(holds(number, bound) for number in numbers):  # NaN holds no bound
            raise UserError(f"{key}={as_typed(result)}: give {words} {bound}")
    return setting.kind(result) if issubclass(setting.kind, Enum) else result


def converted_value(setting: Setting, value: object) -> object:
    """A value as the setting's type. A count may be `1M`; a single value may stand for a list. Raises UserError."""
    key = setting.name
    wanted_types = get_args(setting.required_type)
    if setting.item_type:
        return list_of_dataclasses(setting.item_type, key, cast("Iterable[object]", value or []))
    if setting.kind is dict:
        if not isinstance(value, dict):
            raise UserError(f"{key}: give names and values, {key}.NAME=VALUE")
        return dict(value)
    if setting.kind is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(wanted_types):
            meaning = f": {setting.help.rstrip('.')}" if setting.help else ""
            raise UserError(f"{key}={as_typed(value)}: give {len(wanted_types)} numbers, '{key}=[...]'{meaning}")
        return tuple(scalar(wanted, key, item) for wanted, item in zip(wanted_types, value))
    if setting.kind is list and value is not None:
        given = value if isinstance(value, list | tuple) else [value]
        return [scalar(wanted_types[0], key, item) for item in given]
    return scalar(str if issubclass(setting.kind, Enum) else setting.kind, key, value)


def scalar(wanted: type, key: str, value: object) -> object:
    """A value as bool, int, bytes, float or str. Raises UserError."""
    if wanted is str and isinstance(value, bool | int | float | str):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if wanted is bool and isinstance(value, bool):
        return value
    if wanted in NUMBER_PARSERS and isinstance(value, str):
        try:
            return NUMBER_PARSERS[wanted](value)
        except ValueError as error:
            raise UserError(f"{key}={value}: {error}") from error
    if wanted in (*NUMBER_PARSERS, float) and isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, TypeError):
            number = float(value)
            if wanted is float or number.is_integer():
                return float(value) if wanted is float else int(value)
    forms = {bool: "true or false", int: "a whole number", Bytes: "bytes (8G)", float: "a number", str: "one text"}
    raise UserError(f"{key}={as_typed(value)}: give {forms[wanted]}")


def is_known_key(names: Iterable[str], key: str) -> bool:
    """Whether a key is among the names, or a section of them."""
    return any(f"{name}.".startswith(f"{key}.") for name in names)


def unknown_key(key: str, names: Iterable[str], verb: str = "") -> str:
    """The message for a key that is not among a verb's `names`.

    It says that the key is a section, was removed, or means another key; else that it is unknown.
    """
    names = list(names)
    keys_inside = [name for name in names if name.startswith(key + ".")]
    if keys_inside:
        return f"{key} is a section of settings; give one of its keys: {', '.join(keys_inside)}"
    if removal := removal_message(key, verb):
        return removal
    word = key.replace("-", "_")
    leaf = word.rpartition(".")[2]
    meant = ALIASES.get(word) or ALIASES.get(leaf, key)
    if meant.partition("=")[0] in names:
        return f"unknown key '{key}'; did you mean '{meant}'?"
    if leaf in ABSENT["open_clip"]:
        return f"unknown key '{key}': {ABSENT['open_clip'][leaf]}"
    return f"unknown key '{key}'{did_you_mean(key, names) or '; --help lists the keys'}"


def removal_message(word: str, verb: str = "") -> str:
    """The message for a word that an earlier version knew, with what to do instead; empty for any other word.

    word: a setting (of the `verb`, or of any), SETTING=VALUE, GROUP=PRESET, or `verb NAME`.
    """
    parts = [word] if "=" in word else word.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]  # the setting, and the sections around it
    for version, words in ABSENT["removed"].items():
        for name in (*(f"{verb} {name}" for name in names), *names):
            if name in words:
                return f"{word} was removed in {version}: {words[name]}"
    return ""


def as_typed(value: object) -> str:
    """A value as a user types it on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{as_typed(item)}' for name, item in value.items())}}}"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
