"""What an evaluation set holds, whatever layout it was read from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from clipscale.common import files
from clipscale.data.sample import MAX_IMAGE_BYTES

T = TypeVar("T")
CLASSIFICATION, RETRIEVAL, COMPOSITION = "classification", "retrieval", "composition"
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")


class Picture(Protocol):
    """A picture of a set."""

    def read(self) -> bytes:
        """Its bytes, encoded. Raises OSError."""


class ImageRef(NamedTuple):
    """The place of one encoded image: a whole file, or `size` bytes from `offset` within an archive."""

    path: Path
    offset: int = 0
    size: int = -1
    forms: tuple[Callable[[bytes], bytes], ...] = ()
    """What makes an encoded image of these bytes, one after another. Each raises OSError."""

    def read(self, most: int = MAX_IMAGE_BYTES) -> bytes:
        """The image's bytes. Raises OSError, also for more than `most`."""
        if self.size < 0:
            data = files.read_bytes(self.path, most)
        else:
            if self.size > most:
                raise OSError(f"it has more than {most} bytes")
            with files.opened(self.path) as file:
                file.seek(self.offset)
                data = file.read(self.size)
        for form in self.forms:
            data = form(data)
        return data


class Question(NamedTuple):
    """Of a compositional set: which caption belongs to which image.

    One or two images and two captions: caption i belongs to image i. One caption: it belongs to the first `right` images.
    """

    images: tuple[int, ...]
    captions: tuple[int, ...]
    right: int = 0


@dataclass(frozen=True)
class EvalSet:
    """One classification set (labels, classnames, templates), retrieval set (captions, owner) or compositional set (captions,
    questions), in reading order.
    """

    name: str
    path: Path
    kind: str
    images: Sequence[Picture]
    labels: Sequence[int] = ()
    """Classification: the class of each image."""
    classnames: Sequence[str] = ()
    templates: Sequence[str] = ()
    """Classification: the prompts, with {c} for the class name."""
    groups: Sequence[int] = ()
    """Classification: the group of each image, from 0, for the accuracy of the worst group."""
    inliers: "EvalSet | None" = None
    """Classification: in-distribution images, the negatives of AUPR; the set's own images are the positives (out of distribution)."""
    captions: Sequence[str] = ()
    """Retrieval, composition: all captions."""
    owner: Sequence[int] = ()
    """Retrieval: the image each caption belongs to."""
    questions: Sequence[Question] = ()
    part_of: Sequence[str] = ()
    """Retrieval: the language of each caption; composition: the file of each question. Empty: the set has no parts."""
    train: "EvalSet | None" = None
    """Of a probe: the pictures that it is trained on. None: classification is zero-shot."""
    shots: int | None = None
    """Of a probe: how many of each class; None: all."""
    metric: tuple[str, ...] = ()
    """The set's main metric: the mean of these. Empty: the set is of no suite."""
    marks: tuple[str, ...] = ()
    """What sets its figures apart from those of the whole set with its own prompts."""
    whole: int | None = None
    """Images of the whole set, if this is a part of it; questions of a compositional set."""
    border: int = 0
    """Pixels that are cut off every side of an image before it is resized."""

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> int:
        """Its images, or its questions."""
        return len(self.questions) or len(self.images)

    @property
    def parts(self) -> list[str]:
        """The names of its results: "" for the set itself, then its parts."""
        return list(dict.fromkeys(["", *self.part_of]))

    def label(self, part: str = "", *marks: str) -> str:
        """The name of its results, or of those of a part."""
        return " ".join(
            [f"{self.name}/{part}" if part else self.name, *(f"({mark})" for mark in (*self.marks, *marks))]
        )

    def limited(self, limit: int | None) -> "EvalSet":
        """At most `limit` images, or questions, of each class or file in proportion, whatever the order of the set.

        They are evenly spaced over the set sorted by class, and by group within a class. The part has another label, so that its figures
        never stand for those of the set.
        """
        if limit is None or limit >= self.size:
            return self
        strata = [of for of in (self.labels, self.groups, self.part_of if self.questions else ()) if of]
        by_class = sorted(range(self.size), key=lambda i: [of[i] for of in strata])
        kept = sorted(by_class[i * self.size // limit] for i in range(limit))
        asked = [self.questions[q] for q in kept] if self.questions else []
        images = sorted({i for question in asked for i in question.images}) if asked else kept
        image_at = {old: new for new, old in enumerate(images)}
        captions = sorted({m for question in asked for m in question.captions})
        captions = captions or [m for m, owner in enumerate(self.owner) if owner in image_at]
        caption_at = {old: new for new, old in enumerate(captions)}
        return replace(
            self,
            marks=(f"limit {limit}", *self.marks),
            whole=self.size,
            images=[self.images[i] for i in images],
            labels=_those(self.labels, images),
            groups=_those(self.groups, images),
            inliers=self.inliers and self.inliers.limited(max(1, limit * len(self.inliers) // len(self))),
            captions=_those(self.captions, captions),
            owner=[image_at[i] for i in _those(self.owner, captions)],
            questions=[
                q._replace(images=_new(q.images, image_at), captions=_new(q.captions, caption_at)) for q in asked
            ],
            part_of=_those(self.part_of, kept if asked else captions),
        )


def _those(values: Sequence[T], index: Sequence[int]) -> Sequence[T]:
    return [values[i] for i in index] if values else ()


def _new(old: Sequence[int], place: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(place[i] for i in old)
