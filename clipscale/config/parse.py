"""From plain values, as YAML and the command line give them, to settings dataclasses.

Every mistake is a UserError of one line that names the setting.
"""

from collections.abc import Iterable
from typing import Any, TypeVar, get_args

from clipscale.common.errors import UserError
from clipscale.common.units import nearest, parse_count
from clipscale.config.presets import group_options
from clipscale.config.renamed import with_current_names
from clipscale.config.setting import Setting, nested, settings_of

T = TypeVar("T")
TRUTH = {"true": True, "yes": True, "on": True, "y": True, "1": True}
TRUTH |= {"false": False, "no": False, "off": False, "n": False, "0": False}


def typed(declared: type[T], values: dict[str, Any]) -> T:
    """Plain nested values as the dataclass `declared`. Raises UserError for an unknown key or a value of the wrong type."""
    settings = {one.name: one for one in settings_of(declared)}
    names = [*group_options(), *settings]

    def build(section: type, values: dict[str, Any], prefix: str) -> Any:
        inside, arguments = nested(section), {}
        for name, value in with_current_names(values, prefix, settings).items():
            key = f"{prefix}{name}"
            if name in inside and isinstance(value, dict):
                arguments[name] = build(inside[name], value, f"{key}.")
            elif key in settings:
                arguments[name] = converted(settings[key], value)
            else:
                raise UserError(misnamed(key, names))
        return section(**arguments)

    result: T = build(declared, values, "")
    return result


def converted(declared: Setting, value: Any) -> Any:
    """A value as the setting's type: counts may be written `1M`, a single value may stand for a list. Raises UserError."""
    key = declared.name
    if declared.kind is tuple:
        kinds = get_args(declared.required)
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            raise UserError(f"{key}={as_typed(value)}: give {len(kinds)} numbers, {key}=[...]")
        return tuple(scalar(kind, f"{key}[{i}]", item) for i, (kind, item) in enumerate(zip(kinds, value)))
    if value is None and declared.optional:
        return None
    if declared.kind is dict and value is not None:
        if not isinstance(value, dict):
            raise UserError(f"{key}: give names and values, {key}.NAME=VALUE")
        return dict(value)
    if declared.kind is list and value is not None:
        (kind,) = get_args(declared.required)
        items = value if isinstance(value, list | tuple) else [value]
        return [scalar(kind, f"{key}[{i}]", item) for i, item in enumerate(items)]
    return scalar(declared.kind, key, value)


def scalar(kind: type, key: str, value: Any) -> Any:
    """A value as bool, int, float or str. Raises UserError."""
    if value is None:
        raise UserError(f"{key}=null: give a value")
    if kind is bool:
        truth = bool(value) if isinstance(value, int) else TRUTH.get(value.lower()) if isinstance(value, str) else None
        if truth is None:
            raise UserError(f"{key}={value}: give true or false")
        return truth
    if kind is str:
        if isinstance(value, list | tuple | dict):
            raise UserError(f"{key}={value}: give one text")
        return str(value)
    wanted = "a whole number" if kind is int else "a number"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UserError(f"{key}={value}: give {wanted}")
    if kind is int and not isinstance(value, int):
        try:
            return parse_count(value if isinstance(value, str) else f"{value:f}")
        except ValueError as error:
            raise UserError(f"{key}={value}: {error}") from error
    try:
        return kind(value)
    except ValueError as error:
        raise UserError(f"{key}={value}: give {wanted}") from error


def misnamed(key: str, names: Iterable[str]) -> str:
    """The message for a key that is not among `names`: it is a section of them, or unknown."""
    names = list(names)
    if inside := [name for name in names if name.startswith(key + ".")]:
        return f"{key} is a section of settings; give one of its keys: {', '.join(inside[:3])}{', ...' * (len(inside) > 3)}"
    sections = {name.rpartition(".")[0] for name in names}
    single = [name for name in names if key.startswith(name + ".") and name not in sections]
    return f"unknown key '{key}'{nearest(single[0] if single else key, names)}"


def as_typed(value: object) -> str:
    """A value as one types it on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
