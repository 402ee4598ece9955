"""What an evaluation set holds, whatever layout it was read from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from clipscale import files
from clipscale.data.sample import MAX_IMAGE_BYTES

CLASSIFICATION, RETRIEVAL = "classification", "retrieval"
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")


class ImageRef(NamedTuple):
    """The place of one encoded image: a whole file, or `size` bytes from `offset` within a tar."""

    path: Path
    offset: int = 0
    size: int = -1

    def read(self) -> bytes:
        """The image's bytes. Raises OSError, also for more than MAX_IMAGE_BYTES."""
        if self.size < 0:
            return files.read_bytes(self.path, MAX_IMAGE_BYTES)
        with files.opened(self.path) as file:
            file.seek(self.offset)
            return file.read(self.size)


@dataclass(frozen=True)
class EvalSet:
    """One classification set (labels, classnames, templates) or retrieval set (captions, owner), in reading order."""

    name: str
    path: Path
    kind: str
    images: Sequence[ImageRef]
    labels: Sequence[int] = ()
    """Classification: the class of each image."""
    classnames: Sequence[str] = ()
    templates: Sequence[str] = ()
    """Classification: the prompts, with {c} for the class name."""
    captions: Sequence[str] = ()
    """Retrieval: all captions."""
    owner: Sequence[int] = ()
    """Retrieval: the image each caption belongs to."""
    whole: int | None = None
    """Images of the whole set, if this is a part of it."""
    border: int = 0
    """Pixels that are cut off every side of an image before it is resized."""

    def __len__(self) -> int:
        return len(self.images)

    def limited(self, limit: int | None) -> "EvalSet":
        """At most `limit` images, evenly spaced: a set that is sorted by class keeps all its classes.

        The part has another name, so that its figures never stand for those of the set.
        """
        if limit is None or limit >= len(self):
            return self
        kept = [i * len(self) // limit for i in range(limit)]
        new_index = {old: new for new, old in enumerate(kept)}
        pairs = [(c, new_index[o]) for c, o in zip(self.captions, self.owner) if o in new_index]
        return replace(
            self,
            name=f"{self.name} (limit {limit})",
            whole=len(self),
            images=[self.images[i] for i in kept],
            labels=[self.labels[i] for i in kept] if self.labels else (),
            captions=[caption for caption, _ in pairs],
            owner=[owner for _, owner in pairs],
        )
