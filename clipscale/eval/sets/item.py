"""The content of an evaluation set, independent of the layout it was read from. Each kind measures a model itself."""

import io
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import numpy as np
from torch import Tensor

from clipscale.common.errors import UserError
from clipscale.common.record import Metrics, WrittenCaption
from clipscale.data.picture import broken_pictures, open_picture, turned_upright
from clipscale.data.sample import MAX_IMAGE_BYTES, BrokenSampleError
from clipscale.distributed.agreement import raise_on_all_ranks
from clipscale.eval.encode import EvalEncoder, ImageBatch

log = logging.getLogger(__name__)


@cache
def warn_once(line: str) -> None:
    """Warn of a set, however often it is evaluated."""
    log.warning(line)


def by_reason(broken: Counter[str]) -> str:
    """Counts of what is left out, the most frequent first."""
    return ", ".join(f"{count} {reason}" for reason, count in broken.most_common())


class ImageRef(NamedTuple):
    """The place of one encoded image: a file, or `size` bytes from `offset` within a shard."""

    path: Path
    offset: int = 0
    size: int = MAX_IMAGE_BYTES + 1
    # Why the image, or its answer, is known to be unusable.
    defect: str = ""
    # Width of a red frame that is not part of the picture, in pixels.
    frame: int = 0
    # Whether the picture is turned as its EXIF orientation says. Published results ignore it, training does not.
    upright: bool = False

    def read(self) -> bytes:
        """The image's bytes, without its frame, and upright if it is to be turned.

        Raises BrokenSampleError (its `defect`; `too_large`; of a changed picture what a decoder finds), OSError, and
        ValueError for a name that no file can have.
        """
        if self.defect:
            raise BrokenSampleError(self.defect)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(min(self.size, MAX_IMAGE_BYTES + 1))
        if len(data) > MAX_IMAGE_BYTES:
            raise BrokenSampleError("too_large")
        data = without_frame(data, self.frame) if self.frame else data
        return turned_upright(data) if self.upright else data


def without_frame(data: bytes, width: int) -> bytes:
    """The picture without a red frame of this many pixels, uncompressed. Without red corners it is returned as it is.

    Raises BrokenSampleError.
    """
    with broken_pictures():
        image = open_picture(data).convert("RGB")
        corners = np.asarray(image)[[0, 0, -1, -1], [0, -1, 0, -1]]
        if corners[:, 0].min() < 200 or corners[:, 1:].max() > 60:
            return data
        inside = io.BytesIO()
        image.crop((width, width, image.width - width, image.height - width)).save(inside, "BMP")
        return inside.getvalue()


@dataclass(frozen=True)
class Measurement:
    """The results of a model on a set."""

    # The metrics over the usable images, for each of `EvalEncoder.at_sizes`, the same on every rank.
    metrics: Sequence[Metrics]
    # Images of all ranks that were left out, by reason.
    broken: Counter[str]
    # Captions that a captioner has written of the first usable pictures.
    written: Sequence[WrittenCaption] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class EvalSet(ABC):
    """Images in reading order, each with its answer."""

    kind: ClassVar[str]
    # The `main_metrics` of a set of this kind, unless its suite names others.
    default_main_metrics: ClassVar[tuple[str, ...]]

    name: str
    path: Path
    images: Sequence[ImageRef]
    # For each image: its class, or its captions, one or more.
    answers: Sequence[object]
    # Their mean is the set's main metric, `main` in its results. Empty: the set is of no suite, and has none.
    main_metrics: tuple[str, ...] = ()
    # Additions to the label of its results: `ema`, `limit 100`, `size 64`. Empty: the whole set, trained weights.
    marks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    @property
    def label(self) -> str:
        """The name of its results."""
        return " ".join([self.name, *(f"({mark})" for mark in self.marks)])

    @abstractmethod
    def measure(self, encoder: EvalEncoder) -> Measurement:
        """Measure the encoder's model. A collective."""

    def read(self, index: int) -> bytes:
        """An image's bytes, as `ImageRef.read`."""
        return self.images[index].read()

    def encode_pictures(
        self,
        encoder: EvalEncoder,
        broken: Counter[str],
        read: Callable[[int], bytes] | None = None,
        take_tokens: Callable[[range, Tensor, Tensor, Tensor], None] | None = None,
    ) -> Iterator[ImageBatch]:
        """Yield this rank's batches of the set's images, by `EvalEncoder.encode_images`. `read`: used instead of the
        set's own.

        At the end `broken` has the pictures of all ranks that are not usable, by reason, and a line counts them. Raises
        UserError on every rank if none is usable.
        """
        yield from encoder.encode_images(len(self), read or self.read, self.label, broken, take_tokens)
        total = broken.total()
        counts = f"eval.sets: {self.path}: {total} of {len(self)} left out: {by_reason(broken)}"
        if total == len(self):
            raise_on_all_ranks(UserError(f"{counts}; nothing is left to evaluate, fetch the set again"))
        if total and encoder.world.is_rank0:
            warn_once(counts)

    def facts(self) -> dict[str, object]:
        """The facts, other than the images, on which the metrics depend."""
        return {}

    def class_of(self, index: int) -> int:
        """The class of an image. A limit takes images of each class in proportion."""
        return 0

    def limited(self, limit: int | None) -> Self:
        """At most `limit` images, of each class in proportion; their results have another label.

        They are evenly spaced over the set sorted by class.
        """
        if limit is None or limit >= len(self):
            return self
        by_class = sorted(range(len(self)), key=self.class_of)
        chosen = sorted(by_class[i * len(self) // limit] for i in range(limit))
        return replace(
            self,
            images=[self.images[i] for i in chosen],
            answers=[self.answers[i] for i in chosen],
            marks=(f"limit {limit}", *self.marks),
        )
