"""Plain values, as YAML and the command line give them, to settings: checks types, choices and bounds, once.

Every mistake is a UserError of one line that names the setting.
"""

from collections.abc import Iterable
from contextlib import suppress
from operator import ge, gt, le, lt
from typing import Any, TypeVar, get_args

from clipscale.common.errors import UserError
from clipscale.common.units import nearest, one_of, parse_count
from clipscale.config.setting import Setting, nested, settings_of

T = TypeVar("T")
MEANT = {
    "batch_size": "batch", "model": "model", "train_data": "data.train", "learning_rate": "optim.lr", "lr": "optim.lr",
    "wd": "optim.weight_decay", "warmup": "schedule.warmup", "workers": "data.workers", "epochs": "epochs",
    "train_num_samples": "samples", "precision": "precision", "pretrained": "model.weights", "gpus": "launch.procs",
    "nproc_per_node": "launch.procs", "accum_freq": "cache.chunk", "name": "run", "imagenet_val": "eval.sets",
    "precision=amp": "fp16", "precision=amp_bf16": "bf16", "precision=amp_bfloat16": "bf16",
}  # fmt: skip
"""Words of open_clip and others -> the setting or preset that is meant."""
BOUNDS = {"least": (ge, "at least"), "above": (gt, "more than"), "below": (lt, "less than"), "most": (le, "at most")}


def typed(declared: type[T], values: dict[str, Any]) -> T:
    """Plain nested values as the dataclass `declared`; what is not given has its default. Raises UserError."""
    settings = {setting.name: setting for setting in settings_of(declared)}

    def build(section: type, values: dict[str, Any], prefix: str) -> Any:
        inside, arguments = nested(section), {}
        for name, value in values.items():
            key = f"{prefix}{name}"
            if name in inside and isinstance(value, dict):
                arguments[name] = build(inside[name], value, f"{key}.")
            elif key in settings:
                arguments[name] = accepted(settings[key], value)
            else:
                raise UserError(misnamed(key, settings))
        return section(**arguments)

    result: T = build(declared, values, "")
    return result


def accepted(setting: Setting, value: Any) -> Any:
    """A value as the setting's type, if it is one of its choices and within its bounds. Raises UserError."""
    if value is None and setting.optional:
        return None
    key, result = setting.name, converted(setting, value)
    if setting.choices is not None and result not in setting.choices:
        raise UserError(f"{key}={result}: choose {one_of(setting.choices)}{nearest(str(result), setting.choices)}")
    for name, bound in setting.bounds.items():
        holds, words = BOUNDS[name]
        if not all(holds(number, bound) for number in (result if setting.kind is tuple else [result])):  # nor is NaN
            raise UserError(f"{key}={as_typed(result)}: give {words} {bound}")
    return result


def converted(setting: Setting, value: Any) -> Any:
    """A value as the setting's type: a count may be `1M`, a single value stand for a list. Raises UserError."""
    key, kinds = setting.name, get_args(setting.required)
    if setting.kind is dict:
        if not isinstance(value, dict):
            raise UserError(f"{key}: give names and values, {key}.NAME=VALUE")
        return dict(value)
    if setting.kind is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            raise UserError(f"{key}={as_typed(value)}: give {len(kinds)} numbers, {key}=[...]")
        return tuple(scalar(kind, key, item) for kind, item in zip(kinds, value))
    if setting.kind is list and value is not None:
        return [scalar(kinds[0], key, item) for item in (value if isinstance(value, list | tuple) else [value])]
    return scalar(setting.kind, key, value)


def scalar(kind: type, key: str, value: Any) -> Any:
    """A value as bool, int, float or str. Raises UserError."""
    if kind is str and isinstance(value, bool | int | float | str):
        return str(value)
    if kind is bool and isinstance(value, bool):
        return value
    try:
        if kind is int and isinstance(value, str):
            return parse_count(value)
    except ValueError as error:
        raise UserError(f"{key}={value}: {error}") from error
    if kind in (int, float) and not isinstance(value, bool):
        with suppress(ValueError, TypeError):
            number = float(value)
            if kind is float or number.is_integer():
                return kind(value)
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "one text"}
    raise UserError(f"{key}={as_typed(value)}: give {wanted[kind]}")


def misnamed(key: str, names: Iterable[str]) -> str:
    """The message for a key that is not among `names`: it is a section of them, or unknown."""
    names = list(names)
    if inside := [name for name in names if name.startswith(key + ".")]:
        more = ", ..." * (len(inside) > 3)
        return f"{key} is a section of settings; give one of its keys: {', '.join(inside[:3])}{more}"
    meant = MEANT.get(key)
    return f"unknown key '{key}'{nearest(meant if meant in names else key, names)}"


def as_typed(value: object) -> str:
    """A value as one types it on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
