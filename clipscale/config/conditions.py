"""Reads the settings that choose samples and captions: conditions (`similarity>=0.3`) and caption sources."""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import ge, gt, le, lt
from typing import NamedTuple, cast

from clipscale.common.errors import UserError

_COMPARE: dict[str, Callable[[float, float], bool]] = {">=": ge, "<=": le, ">": gt, "<": lt}
_CONDITION = re.compile(r"^\s*([\w .:-]+?)\s*(>=|<=|!=|==|=|>|<)\s*(.*?)\s*$")
# The name of a condition on the caption's length in characters.
CAPTION = "caption"
# The name of a condition on `SHARD/KEY`, for example to leave out a sample that kills a loader.
SAMPLE = "sample"
# Parts of a caption that can be used. `data/sentences.py` defines them.
PARTS = ("", "sentence", "span", "later")
# Conditions on a picture: each is a function of its width and height in pixels.
SIZES: dict[str, Callable[[int, int], float]] = {
    "width": lambda width, height: width,
    "height": lambda width, height: height,
    "side": min,
    "aspect": lambda width, height: max(width, height) / min(width, height),
}


@dataclass(frozen=True)
class Condition:
    """One condition on a sample: on its name, its captions, its picture's size, or a field of its json."""

    name: str
    sign: str
    # Alternatives for `=` and `!=`; otherwise one value.
    values: tuple[str, ...]

    @property
    def is_of_field(self) -> bool:
        """Whether the condition is on a field of the json."""
        return self.name not in (SAMPLE, CAPTION, *SIZES)

    def holds(self, value: object) -> bool:
        """Whether a value meets the condition. Texts are compared without regard to case.

        Raises ValueError, TypeError or OverflowError if the condition compares numbers and the value is
        no number.
        """
        if self.sign in _COMPARE:
            return _COMPARE[self.sign](float(cast(float, value)), float(self.values[0]))
        return any(_equal(value, text) for text in self.values) == (self.sign == "=")


def _equal(value: object, text: str) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(ValueError):
            return float(value) == float(text)
    return str(value).casefold() == text.casefold()


def parse_conditions(texts: Sequence[str]) -> tuple[Condition, ...]:
    """Parse `data.filter`, the cheapest conditions first: captions, fields, pictures. Raises UserError."""
    return tuple(sorted(map(parse_condition, texts), key=lambda each: (each.name in SIZES, each.is_of_field)))


def parse_condition(text: str) -> Condition:
    """Parse a condition such as `FIELD>=NUMBER`. Raises UserError."""
    match = _CONDITION.match(text)
    if not match:
        raise UserError(f"data.filter={text!r}: write a name, one of >= <= != > < =, and a value: similarity>=0.3")
    name, sign, value = match.groups()
    sign = sign.replace("==", "=")
    if sign in ("=", "!="):
        return Condition(name, sign, tuple(text.strip() for text in value.split("|")))
    try:
        float(value)
    except ValueError as error:
        raise UserError(f"data.filter={text!r}: {value!r} is not a number") from error
    return Condition(name, sign, (value,))


class CaptionSource(NamedTuple):
    """An entry of `data.captions`: `txt` or `json:FIELD`. `part`: an entry of PARTS, empty for the whole caption."""

    name: str
    weight: float
    part: str


def source_names(texts: Sequence[str]) -> list[str]:
    """Names of the caption sources, in the order in which they are tried."""
    return [source.name for source in parse_caption_sources(texts)]


def parse_caption_sources(texts: Sequence[str]) -> tuple[CaptionSource, ...]:
    """Parse caption sources with their weights: `txt`, `json:caption@span=0.5`. Raises UserError."""
    sources = []
    for text in texts:
        name, _, weight = text.partition("=")
        try:
            share = float(weight or 1)
        except ValueError:
            share = math.nan
        if not name.strip() or not 0 <= share < math.inf:
            raise UserError(f"data.captions={text}: write sources with weights from 0 on, as in [txt=1,json:alt=3]")
        source, separator, part = name.strip().rpartition("@")
        if not separator or (part not in PARTS and ":" in source):  # a json field may have @ in its name
            source = name.strip()
            part = ""
        if part not in PARTS:
            raise UserError(f"data.captions={text}: @{part} is none of {', '.join(f'@{each}' for each in PARTS[1:])}")
        sources.append(CaptionSource(source, share, part))
    if not any(source.weight for source in sources):
        raise UserError(f"data.captions={list(texts)}: weights must not all be zero")
    return tuple(sources)
