"""Decides which samples are used, which of its texts are a sample's captions, and which samples are the same.

Both depend only on the sample and its own random numbers, so filtered epochs are as exact as unfiltered ones.
"""

import math
import operator
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig, FilterConfig
from clipscale.data.decode import Picture, captions_of, image_bytes, json_fields
from clipscale.data.order import CounterRNG
from clipscale.data.sample import BrokenSampleError, RawSample
from clipscale.data.shards.addresses import hash64

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"^\s*([\w .:-]+?)\s*(>=|<=|!=|==|=|>|<)\s*(.*?)\s*$")


@dataclass(frozen=True)
class Condition:
    """One condition on a field of the json member."""

    name: str
    sign: str
    values: tuple[str, ...]
    """Alternatives for `=` and `!=`; otherwise one value."""

    def holds(self, value: Any) -> bool:
        """Whether a value meets the condition. Numbers are compared as numbers, texts without regard to case.

        Raises ValueError or TypeError for a value that must be a number and is none.
        """
        if self.sign in ("=", "!="):
            return any(_equal(value, wanted) for wanted in self.values) == (self.sign == "=")
        return _COMPARE[self.sign](float(value), float(self.values[0]))


def _equal(value: Any, wanted: str) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value) == float(wanted)
        except ValueError:
            return False
    return str(value).casefold() == wanted.casefold()


def condition(text: str) -> Condition:
    """Parse a condition such as `FIELD>=NUMBER`. Raises UserError."""
    match = _CONDITION.match(text)
    if not match:
        raise UserError(f"data.filter.fields={text!r}: write FIELD, one of >= <= != > < =, a value: similarity>=0.3")
    name, sign, value = match[1], match[2].replace("==", "="), match[3]
    if sign in ("=", "!="):
        return Condition(name, sign, tuple(part.strip() for part in value.split("|")))
    try:
        float(value)
    except ValueError as error:
        raise UserError(f"data.filter.fields={text!r}: {value!r} is no number") from error
    return Condition(name, sign, (value,))


def caption_sources(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Parse caption sources with their weights: `txt`, `json:caption=0.5`. Raises UserError."""
    pairs = [text.partition("=") for text in texts]
    try:
        sources = tuple((name.strip(), float(weight or 1)) for name, _, weight in pairs)
    except ValueError as error:
        raise UserError(f"data.captions={list(texts)}: write sources with weights, as in [txt=1,json:alt=3]") from error
    weights = [weight for _, weight in sources]
    if not all(name and 0 <= weight < math.inf for name, weight in sources) or not sum(weights):
        raise UserError(f"data.captions={list(texts)}: weights must be non-negative and not all zero")
    return sources


@dataclass(frozen=True)
class Selection:
    """The filters and caption sources of a run. Workers get a copy by pickle."""

    captions: tuple[tuple[str, float], ...]
    """Sources (`txt`, `json:FIELD`) and their weights."""
    conditions: tuple[Condition, ...]
    filters: FilterConfig
    count: int = 1
    """Captions of a sample."""
    same: str | None = None
    """What samples share: `caption`, or a field of the json."""
    first: bool = False
    """Whether a sample's first caption is taken, as `clipscale embed` does, and none is drawn."""

    def members(self) -> set[str]:
        """The extensions to read, apart from the picture's."""
        fields = self.conditions or self.same not in (None, "caption")
        return {source.partition(":")[0] for source, _ in self.captions} | ({"json"} if fields else set())

    def draw(self, members: dict[str, bytes], rng: CounterRNG) -> list[str]:
        """The sample's captions. Those of a source share its weight. They are drawn by weight without replacement; once
        all are drawn, all can be drawn again. A source of weight 0 is used if no other has a text.

        Raises BrokenSampleError with the first source's reason if none has a text.
        """
        texts, errors = list[tuple[str, float]](), list[BrokenSampleError]()
        for source, weight in self.captions:
            try:
                found = captions_of(members, source)
                texts += [(text, weight / len(found)) for text in found]
            except BrokenSampleError as error:
                errors.append(error)
        if not texts:
            raise errors[0]
        if self.first:
            return [texts[0][0]]
        pool = [(text, weight) for text, weight in texts if weight] or [(texts[0][0], 1.0)]
        drawn, left = list[str](), list[tuple[str, float]]()
        for _ in range(self.count):
            left = left or pool.copy()
            i, at = -1, rng.uniform() * sum(weight for _, weight in left)
            while at >= 0 and i < len(left) - 1:
                i += 1
                at -= left[i][1]
            drawn.append(left.pop(i)[0])
        return drawn

    def key(self, sample: RawSample, captions: Sequence[str], place: str) -> int:
        """A signed 64-bit hash of what samples share. Captions are compared without regard to case and white space, a
        field's text or number without white space around it. A sample without it has a key of its own, by its `place`.
        """
        value: Any = " ".join(captions[0].casefold().split()) if self.same == "caption" else None
        with suppress(BrokenSampleError, KeyError):
            value = value or json_fields(sample.members["json"]).get(str(self.same))
        shared = isinstance(value, str | int | float) and str(value).strip() not in ("", "nan")
        return hash64(f"same {str(value).strip()}" if shared else f"alone {place}") - (1 << 63)

    def check(self, sample: RawSample, captions: Sequence[str]) -> None:
        """Raise BrokenSampleError with the filter's reason for a sample that a filter drops."""
        filters = self.filters
        for caption in captions:
            if len(caption) < filters.min_caption:
                raise BrokenSampleError("filter_short_caption", f"{len(caption)} characters")
            if filters.max_caption is not None and len(caption) > filters.max_caption:
                raise BrokenSampleError("filter_long_caption", f"{len(caption)} characters")
        if self.conditions:
            self._check_fields(json_fields(sample.members.get("json", b"{}")))
        if filters.min_side or filters.max_aspect is not None:
            picture = Picture(image_bytes(sample.members))
            short, long = sorted((picture.width, picture.height))
            if short < filters.min_side:
                raise BrokenSampleError("filter_min_side", f"{picture.width} x {picture.height} pixels")
            if filters.max_aspect is not None and long > filters.max_aspect * short:
                raise BrokenSampleError("filter_aspect", f"{picture.width} x {picture.height} pixels")

    def _check_fields(self, fields: dict[str, Any]) -> None:
        for wanted in self.conditions:
            value = fields.get(wanted.name)
            try:
                if value is None or (isinstance(value, float) and math.isnan(value)):
                    raise ValueError("missing")
                holds = wanted.holds(value)
            except (ValueError, TypeError, OverflowError) as error:  # missing, or not a number where one is needed
                raise BrokenSampleError(f"filter_no_{wanted.name}") from error
            if not holds:
                raise BrokenSampleError(f"filter_{wanted.name}", str(value)[:100])


def selection(config: DataConfig, *, first: bool = False) -> Selection:
    """Parse the settings. Raises UserError for conditions, sources or files that cannot be used."""
    conditions = tuple(condition(text) for text in config.filter.fields)
    captions, count = caption_sources(config.captions), config.captions_per_step
    return Selection(captions, conditions, config.filter, count, config.same, first)
