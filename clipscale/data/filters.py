"""Decides which samples are used, and which of its texts are a sample's captions.

Both depend only on the sample and its own random numbers, so filtered epochs are as exact as unfiltered ones.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from clipscale.common.record import Record
from clipscale.config.conditions import CAPTION, SAMPLE, SIZES, CaptionSource, Condition, caption_sources, conditions
from clipscale.config.data import DataConfig
from clipscale.data.decode import Picture, captions_of, first_caption, image_bytes, json_fields
from clipscale.data.order import CounterRNG
from clipscale.data.sample import BrokenSampleError, RawSample
from clipscale.data.shards.addresses import basename, hash64, utf8


@dataclass(frozen=True)
class Selection:
    """The filters and caption sources of a run. Workers get a copy by pickle."""

    captions: tuple[CaptionSource, ...]
    conditions: tuple[Condition, ...]
    # What samples of equal keys share: the `caption`, or a field of the json.
    same: str | None = None

    def members(self) -> set[str]:
        """The extensions to read, apart from the picture's."""
        members = {source.name.partition(":")[0] for source in self.captions}
        if self.same not in (None, "caption") or any(each.of_field for each in self.conditions):
            members.add("json")
        return members

    def draw(self, members: dict[str, bytes], rng: CounterRNG) -> tuple[str, str]:
        """The sample's caption, drawn by weight, and the part of it that is to be taken. The captions of a source share
        its weight. A source of weight 0 is used if no other has a text.

        Raises BrokenSampleError with the first source's reason if none has a text.
        """
        pool = []
        for source in self.captions:
            if source.weight:
                with suppress(BrokenSampleError):
                    texts = captions_of(members, source.name)
                    pool += [(text, source.weight / len(texts), source.part) for text in texts]
        if not pool:
            pool = [(first_caption(members, [source.name for source in self.captions]), 1.0, "")]
        # the smallest of exponential variates at rates of the weights
        return min((-math.log(1 - rng.uniform()) / weight, text, part) for text, weight, part in pool)[1:]

    def check(self, sample: RawSample, caption: str) -> None:
        """Raise BrokenSampleError with the filter's reason for a sample that a filter drops."""
        fields: Record | None = None
        picture: Picture | None = None
        for condition in self.conditions:
            if condition.name == SAMPLE:
                _require(condition, utf8(name_of(sample)))
            elif condition.name == CAPTION:
                _require(condition, len(caption))
            elif condition.name in SIZES:
                picture = picture or Picture(image_bytes(sample.members))
                _require(condition, SIZES[condition.name](picture.width, picture.height))
            else:
                if fields is None:
                    fields = json_fields(sample.members.get("json", b"{}"))
                _require(condition, fields.get(condition.name))

    def key(self, sample: RawSample, caption: str, own: str) -> int:
        """A signed 64-bit hash of what samples share; `own`: names the sample itself.

        Captions are compared without regard to case and white space, a field's text or number without white space
        around it. A sample without it has a key of its own.
        """
        value = None
        if self.same == "caption":
            value = compared(caption)
        elif "json" in sample.members and self.same:
            with suppress(BrokenSampleError):
                value = json_fields(sample.members["json"]).get(self.same)
        return same_key(value, own)


def compared(caption: str) -> str:
    """What is compared of a caption: neither case nor white space."""
    return " ".join(caption.casefold().split())


def same_key(value: Any, own: str) -> int:
    """A signed 64-bit hash of a text or number without white space around it; of `own`, where there is none."""
    shared = isinstance(value, str | int | float) and str(value).strip() not in ("", "nan")
    return hash64(f"same {str(value).strip()}" if shared else f"alone {own}") - (1 << 63)


def _require(condition: Condition, value: Any) -> None:
    """Raise BrokenSampleError `filter_NAME` for a value that does not meet the condition, and `filter_no_NAME` for
    none, or none that is a number where one is needed."""
    try:
        if value is None or value != value:  # NaN
            raise ValueError("missing")
        holds = condition.holds(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise BrokenSampleError(f"filter_no_{condition.name}") from error
    if not holds:
        raise BrokenSampleError(f"filter_{condition.name}", str(value)[:100])


def name_of(sample: RawSample) -> str:
    """`SHARD/KEY`; messages and conditions name samples by its `utf8`."""
    return f"{basename(sample.url)}/{sample.key}"


def selection(config: DataConfig) -> Selection:
    """Parse the settings. Raises UserError for conditions, sources or files that cannot be used."""
    return Selection(
        caption_sources(config.captions),
        conditions(config.filter),
        config.same,
    )
