"""What an evaluation set holds, whatever layout it was read from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from clipscale.data.sample import MAX_IMAGE_BYTES

T = TypeVar("T")
CLASSIFICATION, RETRIEVAL = "classification", "retrieval"
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")


class ImageRef(NamedTuple):
    """The place of one encoded image: a whole file, or `size` bytes from `offset` within a shard."""

    path: Path
    offset: int = 0
    size: int = -1

    def read(self) -> bytes:
        """The image's bytes. Raises OSError, also for more than MAX_IMAGE_BYTES."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(self.size if self.size >= 0 else MAX_IMAGE_BYTES + 1)
        if len(data) > MAX_IMAGE_BYTES:
            raise OSError(f"{self.path} has more than {MAX_IMAGE_BYTES} bytes")
        return data


@dataclass(frozen=True)
class EvalSet:
    """A classification set (labels, classnames, templates) or a retrieval set (captions, owner), in reading order."""

    name: str
    path: Path
    kind: str
    images: Sequence[ImageRef]
    labels: Sequence[int] = ()
    """Classification: the class of each image."""
    classnames: Sequence[str] = ()
    templates: Sequence[str] = ()
    """Classification: the prompts, with {c} for the class name."""
    groups: Sequence[int] = ()
    """Classification: the group of each image, from 0, for the accuracy of the worst group."""
    captions: Sequence[str] = ()
    owner: Sequence[int] = ()
    """Retrieval: the image each caption belongs to; every image has at least one caption."""
    metric: tuple[str, ...] = ()
    """The set's main metric: the mean of these. Empty: the set is of no suite."""
    marks: tuple[str, ...] = ()
    """What sets its results apart from those of the whole set with trained weights, such as `ema`."""
    whole: int | None = None
    """Images of the whole set, if this is a part of it."""

    def __len__(self) -> int:
        return len(self.images)

    @property
    def label(self) -> str:
        """The name of its results."""
        return " ".join([self.name, *(f"({mark})" for mark in self.marks)])

    def limited(self, limit: int | None) -> "EvalSet":
        """At most `limit` images, of each class in proportion; their results have another label.

        They are evenly spaced over the set sorted by class, and by group within a class.
        """
        if limit is None or limit >= len(self):
            return self
        strata = [of_image for of_image in (self.labels, self.groups) if of_image]
        by_class = sorted(range(len(self)), key=lambda i: [of_image[i] for of_image in strata])
        images = sorted(by_class[i * len(self) // limit] for i in range(limit))
        new_index = {old: new for new, old in enumerate(images)}
        captions = [m for m, owner in enumerate(self.owner) if owner in new_index]
        return replace(
            self,
            marks=(f"limit {limit}", *self.marks),
            whole=len(self),
            images=[self.images[i] for i in images],
            labels=_chosen(self.labels, images),
            groups=_chosen(self.groups, images),
            captions=_chosen(self.captions, captions),
            owner=[new_index[i] for i in _chosen(self.owner, captions)],
        )


def _chosen(values: Sequence[T], index: Sequence[int]) -> Sequence[T]:
    return [values[i] for i in index] if values else ()
