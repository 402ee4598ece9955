"""Words KEY=VALUE of the benchmarks. Imports nothing heavy: a wrong word is answered at once."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from clipscale.common.errors import UserError
from clipscale.common.text import did_you_mean
from clipscale.common.units import parse_count

Row = dict[str, Any]


def settings_of(defaults: Row, words: Sequence[str]) -> SimpleNamespace:
    """The defaults, changed by words KEY=VALUE; whole numbers may be counts such as 32k. Raises UserError."""
    values = dict(defaults)
    kinds: dict[type, Callable[[str], Any]] = {int: parse_count, float: float}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in defaults:
            known = ", ".join(f"{key}=" for key in defaults)
            raise UserError(f"{word}: unknown{did_you_mean(key, defaults)}; there are {known}")
        try:
            values[key] = kinds.get(type(defaults[key]), str)(value)
        except ValueError as error:
            raise UserError(f"{word}: {error}") from error
    if values.get("device") == "auto":
        import torch

        values["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    return SimpleNamespace(**values)


def counts(text: str) -> list[int]:
    """`1k,2k` as whole numbers. Raises UserError."""
    try:
        return [parse_count(word) for word in text.split(",") if word]
    except ValueError as error:
        raise UserError(str(error)) from error
