"""The pixels of evaluation: open_clip's transform.

C = 3: channels, S: side of the model's input in pixels.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.pool import MapResult, ThreadPool
from typing import TypeVar

import numpy as np
from open_clip import image_transform
from torchvision.transforms import Compose, Normalize, ToTensor

from clipscale.data.picture import broken_pictures, check_pixels, open_picture, rgb

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class EvalTransform:
    """Picture bytes to the pixels of open_clip's evaluation transform, on which published results were measured.

    As in open_clip, Pillow decodes, converts to RGB and resizes, and the EXIF orientation is ignored. Unlike there,
    16-bit greys are scaled to 8 bits, as in training; in open_clip they become white.
    """

    image_size: int
    # `shortest`: the shorter side becomes S, the centre is cut out; `squash`: both sides become S; `longest`: the
    # longer side becomes S, black fills the rest.
    mode: str = "shortest"
    interpolation: str = "bicubic"

    def __call__(self, data: bytes) -> np.ndarray:
        """(C, S, S) uint8. Raises BrokenSampleError."""
        with broken_pictures():
            image = rgb(open_picture(data))
            if self.mode == "shortest":  # the longer side grows in proportion, so it needs a limit
                check_pixels(self.image_size, self.image_size * max(image.size) // min(image.size))
            return np.ascontiguousarray(np.asarray(self.resized(image)).transpose(2, 0, 1))

    @cached_property
    def resized(self) -> Compose:
        """open_clip's transform of a picture, up to the conversion to numbers."""
        transform = image_transform(
            self.image_size, is_train=False, resize_mode=self.mode, interpolation=self.interpolation
        )
        return Compose([step for step in transform.transforms if not isinstance(step, ToTensor | Normalize)])


def prefetched(
    pool: ThreadPool, work: Callable[[T], R], batches: Iterable[Sequence[T]]
) -> Iterator[tuple[Sequence[T], MapResult[R]]]:
    """Each batch with the pending results of `work` for its items. Meanwhile the pool works on the next batch.

    Leaving the pool waits for none of its threads: one of them may read from a storage that is silent.
    """
    before: tuple[Sequence[T], MapResult[R]] | None = None
    for batch in batches:
        begun = batch, pool.map_async(work, batch, chunksize=1)
        if before is not None:
            yield before
        before = begun
    if before is not None:
        yield before
