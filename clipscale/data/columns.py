"""What a batch stores of every sample: its pixels, and columns beside pictures and captions."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from clipscale.config.data import DataConfig
from clipscale.data.decode import TrainTransform, json_fields
from clipscale.data.features import TeacherFeatures
from clipscale.data.sample import BrokenSampleError, ChosenSample
from clipscale.data.shards.addresses import hash64

KEYS = "keys"
"""The column of `data.same`: equal for samples that are the same."""


@dataclass(frozen=True)
class Column:
    """A value beside every sample's picture and captions. Sent to workers by pickle."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[ChosenSample], Any]
    """The value of a sample. Raises BrokenSampleError to leave the sample out."""
    members: tuple[str, ...] = ()
    """Extensions of the members that it is read from, apart from the picture's and the captions'."""
    for_loss: bool = False
    """Whether the loss takes it."""
    of_first_caption: bool = False
    """Whether it was computed from the sample's first caption, which is the one to train on then."""


class Columns(NamedTuple):
    """All that is stored of a sample beside its tokens."""

    images: TrainTransform
    """Makes a picture's pixels."""
    beside: tuple[Column, ...]
    pad: int | None = None
    """The padding token; captions' lengths are stored then."""


def columns_of(
    config: DataConfig, side: int, teachers: Sequence[TeacherFeatures] = (), *, pad: int | None = None
) -> Columns:
    """What the settings ask for. `side`: of the model's pictures. `pad`: of captions that are sorted by length."""
    beside: list[Column] = []
    if config.same is not None:
        members = () if config.same == "caption" else ("json",)
        beside.append(Column(KEYS, (), "int64", partial(_key, config.same), members, for_loss=True))
    for teacher in teachers:
        name = teacher.member
        column = Column(name, teacher.shape, teacher.dtype, teacher.of, (name,), for_loss=True, of_first_caption=True)
        beside.append(column)
    augment = config.augment
    images = TrainTransform(side, augment.scale, augment.ratio, augment.flip, config.max_pixels)
    return Columns(images, tuple(beside), pad)


def _key(same: str, sample: ChosenSample) -> int:
    """A signed 64-bit hash of what samples share: the `caption`, or a field of the json.

    Captions are compared without regard to case and white space, a field's text or number without white space around
    it. A sample without it has a key of its own, by its place.
    """
    value = None
    if same == "caption":
        value = " ".join(sample.captions[0].casefold().split())
    elif "json" in sample.raw.members:
        with suppress(BrokenSampleError):
            value = json_fields(sample.raw.members["json"]).get(same)
    shared = isinstance(value, str | int | float) and str(value).strip() not in ("", "nan")
    return hash64(f"same {str(value).strip()}" if shared else f"alone {sample.place}") - (1 << 63)
