"""Decides which samples are used, and which texts of a sample are its captions.

Both decisions depend only on the sample and its own random numbers, so filtered epochs are as exact as unfiltered ones.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from clipscale.common.batch import ONE_CAPTION, TextLayout
from clipscale.config.conditions import (
    CAPTION,
    SAMPLE,
    SIZES,
    CaptionSource,
    Condition,
    parse_caption_sources,
    parse_conditions,
)
from clipscale.config.data import DataConfig
from clipscale.data.addresses import basename
from clipscale.data.hashing import hash64, utf8
from clipscale.data.order import CounterRNG
from clipscale.data.picture import Picture
from clipscale.data.sample import BrokenSampleError, RawSample, captions_in, first_caption, image_bytes, json_fields


@dataclass(frozen=True)
class Selection:
    """The filters and caption sources of a run. Workers get a copy by pickle."""

    captions: tuple[CaptionSource, ...]
    conditions: tuple[Condition, ...]
    # What makes samples equal: the `caption`, or a field of the json; None if nothing does.
    same: str | None = None
    # How many captions and hard negatives of a sample a step takes.
    text_layout: TextLayout = ONE_CAPTION
    # The source of hard negatives; empty without any.
    negatives: str = ""
    # Whether a sample's first caption is taken, which teachers have seen, and none is drawn.
    first_caption_only: bool = False

    def extensions_to_read(self) -> set[str]:
        """The extensions to read, apart from the picture's."""
        members = {source.name.partition(":")[0] for source in self.captions}
        reads_field = any(condition.is_of_field for condition in self.conditions)
        if self.negatives or reads_field or self.same not in (None, "caption"):
            members.add("json")
        return members

    def draw(self, members: dict[str, bytes], rng: CounterRNG) -> list[tuple[str, str]]:
        """The sample's captions, drawn by weight, each with the part of it that is to be taken.

        The captions of a source share its weight. A source of weight 0 is used if no other source has a text.

        Raises BrokenSampleError with the first source's reason if none has a text.
        """
        if self.first_caption_only:
            return [(first_caption(members, [source.name for source in self.captions]), "")]
        pool = []
        for source in self.captions:
            if source.weight:
                with suppress(BrokenSampleError):
                    texts = captions_in(members, source.name)
                    pool += [(source.weight / len(texts), text, source.part) for text in texts]
        if not pool:
            pool = [(1.0, first_caption(members, [source.name for source in self.captions]), "")]
        return draw_by_weight(pool, self.text_layout.captions, rng)

    def draw_negatives(self, members: dict[str, bytes], rng: CounterRNG) -> list[str]:
        """The sample's hard negatives. Raises BrokenSampleError `no_negative` where there is none."""
        if not self.negatives:
            return []
        try:
            pool = [(1.0, text, "") for text in captions_in(members, self.negatives)]
        except BrokenSampleError as error:
            raise BrokenSampleError("no_negative", str(error)) from error
        return [text for text, _ in draw_by_weight(pool, self.text_layout.negatives, rng)]

    def check(self, sample: RawSample, captions: Sequence[str]) -> None:
        """Raise BrokenSampleError with the filter's reason for a sample that a filter drops."""
        fields: dict[str, object] | None = None
        picture: Picture | None = None
        for condition in self.conditions:
            if condition.name == SAMPLE:
                _check_condition(condition, utf8(sample_name(sample)))
            elif condition.name == CAPTION:
                for caption in captions:
                    _check_condition(condition, len(caption))
            elif condition.name in SIZES:
                picture = picture or Picture.read(image_bytes(sample.members))
                _check_condition(condition, SIZES[condition.name](picture.width, picture.height))
            else:
                if fields is None:
                    fields = json_fields(sample.members.get("json", b"{}"))
                _check_condition(condition, fields.get(condition.name))

    def sameness_key(self, sample: RawSample, caption: str, fallback_id: str) -> int:
        """A signed 64-bit hash, equal for samples that are the same by `same`.

        Captions are compared without case and with single spaces. The text or number of a field is compared without the
        white space around it. A sample without the field gets a key of its own, from `fallback_id`.
        """
        value: object = None
        if self.same == "caption":
            value = comparable_caption(caption)
        elif "json" in sample.members and self.same:
            with suppress(BrokenSampleError):
                value = json_fields(sample.members["json"]).get(self.same)
        return key_of_value(value, fallback_id)


def comparable_caption(caption: str) -> str:
    """The caption as `data.same` compares it: without case, and with single spaces."""
    return " ".join(caption.casefold().split())


def key_of_value(value: object, fallback_id: str) -> int:
    """A signed 64-bit hash of a text or number, without white space around it; of `fallback_id` for any other value."""
    text = str(value).strip()
    is_shared = isinstance(value, str | int | float) and text not in ("", "nan")
    name = f"same {text}" if is_shared else f"alone {fallback_id}"
    return hash64(name) - (1 << 63)


def _check_condition(condition: Condition, value: object) -> None:
    """Raise BrokenSampleError `filter_NAME` for a value that does not meet the condition.

    The reason is `filter_no_NAME` if there is no value, or if it is not a number where one is needed.
    """
    try:
        if value is None or value != value:  # NaN
            raise ValueError("missing")
        holds = condition.holds(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise BrokenSampleError(f"filter_no_{condition.name}") from error
    if not holds:
        raise BrokenSampleError(f"filter_{condition.name}", str(value)[:100])


def draw_by_weight(pool: Sequence[tuple[float, str, str]], count: int, rng: CounterRNG) -> list[tuple[str, str]]:
    """Draw texts and their parts by weight without replacement; once all are drawn, all can be drawn again.

    pool: weight, text, part. Sorted by exponential variates at rates of the weights (Efraimidis and
    Spirakis 2006).
    """
    texts: list[tuple[str, str]] = []
    while len(texts) < count:
        order = sorted((-math.log(1 - rng.uniform()) / weight, text, part) for weight, text, part in pool)
        texts += [(text, part) for _, text, part in order]
    return texts[:count]


def sample_name(sample: RawSample) -> str:
    """`SHARD/KEY`; messages and conditions name samples by its `utf8`."""
    return f"{basename(sample.url)}/{sample.key}"


def parse_selection(config: DataConfig, *, first_caption_only: bool = False) -> Selection:
    """Parse the settings. `first_caption_only`: see Selection.

    Raises UserError for conditions, sources or files that cannot be used.
    """
    return Selection(
        captions=parse_caption_sources(config.captions),
        conditions=parse_conditions(config.filter),
        same=config.same,
        text_layout=config.text_layout,
        negatives=config.negatives or "",
        first_caption_only=first_caption_only,
    )
