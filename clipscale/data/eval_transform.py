"""The pixels of evaluation: open_clip's transform.

C = 3: channels, S: side of the model's input in pixels.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from clipscale.data.decode import broken_pictures, check_pixels, open_picture

B = TypeVar("B", bound=Iterable[Any])
R = TypeVar("R")

INTERPOLATIONS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


@dataclass(frozen=True)
class EvalTransform:
    """Picture bytes to the pixels of open_clip's evaluation transform, on which published results were measured.

    As there, Pillow decodes, converts to RGB and resizes; the EXIF orientation is ignored.
    """

    side: int
    max_pixels: int = 89_478_485
    mode: str = "shortest"
    """`shortest`: the shorter side becomes S, the centre is cut out; `squash`: both sides become S; `longest`: the
    longer side becomes S, black fills the rest."""
    interpolation: str = "bicubic"

    def __call__(self, data: bytes) -> np.ndarray:
        """(C, S, S) uint8. Raises BrokenSampleError."""
        with broken_pictures():
            image = open_picture(data, self.max_pixels).convert("RGB")
            size = self._size(*image.size)
            check_pixels(*size, self.max_pixels)  # a picture one pixel wide grows by the square of its shorter side
            image = image.resize(size, INTERPOLATIONS[self.interpolation])
            # torchvision's CenterCrop rounds the corner. open_clip rounds a margin that it fills down.
            S = self.side
            left, top = (-((S - n) // 2) if self.mode == "longest" else round((n - S) / 2) for n in image.size)
            image = image.crop((left, top, left + S, top + S))  # beyond the edges it is black
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))

    def _size(self, width: int, height: int) -> tuple[int, int]:
        if self.mode == "squash":
            return self.side, self.side
        if self.mode == "longest":
            ratio = max(width, height) / self.side
            return round(width / ratio), round(height / ratio)
        # torchvision's Resize truncates the longer side.
        if width <= height:
            return self.side, int(self.side * height / width)
        return int(self.side * width / height), self.side


def ahead(pool: Executor, work: Callable[[Any], R], batches: Iterable[B]) -> Iterator[tuple[B, list[R]]]:
    """Each batch with what `work` returns for its items. The pool works on the next batch meanwhile."""
    begun: Iterator[Any] = ((batch, pool.map(work, batch)) for batch in batches)
    for (batch, results), _ in pairwise(chain(begun, [None])):
        yield batch, list(results)
