"""From plain values, as YAML files and the command line give them, to a part's dataclass and its nested ones. OmegaConf, but no Hydra.

Every mistake comes out as a UserError of one line that names the setting.
"""

import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from clipscale.config.keys import group_options, keys, tree
from clipscale.config.renamed import with_current_names
from clipscale.errors import UserError
from clipscale.units import nearest, parse_count

T = TypeVar("T")


def typed(settings: type[T], values: dict[str, Any]) -> T:
    """Plain values as the dataclass `settings`: counts may be spelt `1M`, one value may stand for a list of one.

    Raises UserError for an unknown key or a value of the wrong type.
    """
    values = with_current_names(values, tree(settings.__module__, settings.__name__))
    try:
        result = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(settings), normalise(settings, values)))
    except OmegaConfBaseException as error:
        names = [*group_options(), *(key.name for key in keys(settings.__module__, settings.__name__))]
        raise UserError(explained(error, names) or " ".join(str(error).split())) from error
    assert isinstance(result, settings)
    return with_tuples(result)


def normalise(settings: type, values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Counts to integers and a single value to a list, wherever the dataclass `settings` wants one.

    Raises UserError for a value where there are keys, and for a list of the wrong length.
    """
    result = dict(values)
    for name, hint in get_type_hints(settings).items():
        if name not in values:
            continue
        value, key = values[name], prefix + name
        kind = hint
        if isinstance(hint, UnionType):  # `int | None` and the like
            kind = next(member for member in get_args(hint) if member is not NoneType)
        if isinstance(kind, type) and is_dataclass(kind):
            if not isinstance(value, dict):
                raise UserError(misnamed(key, [f"{key}.{inside.name}" for inside in fields(kind)]))
            result[name] = normalise(kind, value, key + ".")
        elif get_origin(kind) is tuple:
            if not isinstance(value, list | tuple) or len(value) != len(get_args(kind)):
                raise UserError(f"{key}={spelt(value)}: give {len(get_args(kind))} numbers, {key}=[...]")
        elif kind is int and isinstance(value, str | float):
            try:
                result[name] = parse_count(str(value) if isinstance(value, str) else f"{value:f}")
            except ValueError as error:
                raise UserError(f"{key}={value}: {error}") from error
        elif get_origin(kind) is list and value is not None and not isinstance(value, list):
            result[name] = [value]
    return result


def with_tuples(settings: T) -> T:
    """The same object; OmegaConf leaves lists where the dataclasses declare tuples."""
    for name, hint in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if get_origin(hint) is tuple:
            setattr(settings, name, tuple(value))
        elif is_dataclass(value):
            with_tuples(value)
    return settings


def misnamed(key: str, names: Iterable[str]) -> str:
    """What is wrong with a key that is none of `names`: it is a section of them, or there is none like it."""
    names = list(names)
    if inside := [name for name in names if name.startswith(key + ".")]:
        return f"{key} is a section of settings; give one of its keys: {', '.join(inside[:3])}{', ...' * (len(inside) > 3)}"
    sections = {name.rpartition(".")[0] for name in names}
    single = [name for name in names if key.startswith(name + ".") and name not in sections]
    return f"unknown key '{key}'{nearest(single[0] if single else key, names)}"


def spelt(value: object) -> str:
    """A value as one would type it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(spelt, value))}]"
    return "null" if value is None else str(value)


def explained(error: BaseException, names: list[str]) -> str | None:
    """One line for what OmegaConf refused: the setting, and the nearest of `names`; None for what is not known."""
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and error.full_key:
        return misnamed(str(error.full_key), names)
    if isinstance(error, ValidationError) and error.full_key:
        text = " ".join(str(error).split())
        wanted = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "a text"}
        match = re.search(r"Value '(.*)' of type '.*?' could not be converted to (\w+)", text)
        if match and match[2] in wanted:
            return f"{error.full_key}={match[1]}: give {wanted[match[2]]}"
        if not_bool := re.search(r"Value '(.*)' is not a valid bool", text):
            return f"{error.full_key}={not_bool[1]}: give true or false"
        if "is not a ListConfig" in text:
            return f"{error.full_key}: give a list, {error.full_key}=[...]"
        if "Incompatible value 'None'" in text:
            return f"{error.full_key}=null: give a value"
        if listed := re.search(r"Cannot convert '(ListConfig|DictConfig)' to string: '(.*)'", text):
            return f"{error.full_key}={listed[2]}: give one text"
        if "to Dict" in text:
            return f"{error.full_key}: give names and values, {error.full_key}.NAME=VALUE"
        return f"{error.full_key}: {str(error).splitlines()[0]}"
    return None
