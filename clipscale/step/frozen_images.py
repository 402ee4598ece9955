"""Encodes the images of a captioner with a frozen image tower once, as far as memory for their tokens allows.

N: images of a chunk, D: feature width, P: tokens of an image, W: width of the decoder.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from clipscale.data.loader.to_device import Images


class FrozenImages:
    """Gives a captioner the frozen tower's outputs in the place of pixels: features (N, D) and tokens (N, P, W).

    A chunk's first pass without a graph keeps them for its second pass, up to `most_bytes`. The other chunks are
    encoded again.
    """

    def __init__(
        self,
        images: Images,
        tower: nn.Module,
        autocast: Callable[[], AbstractContextManager[object]],
        most_bytes: float,
    ) -> None:
        self.images = images
        self.tower = tower
        self.autocast = autocast
        self.free_bytes = most_bytes
        # Bytes of the outputs of one image; 0 before the first chunk.
        self.bytes_each = 0
        # The outputs of chunks whose second pass is still to come.
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.images)

    def chunk(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        if (start, stop) in self.kept:
            return self.kept.pop((start, stop))
        with torch.no_grad(), self.autocast():
            outputs: tuple[Tensor, Tensor] = self.tower(self.images.chunk(start, stop), with_tokens=True)
        size = sum(rows.nbytes for rows in outputs)
        self.bytes_each = size // (stop - start)
        if not torch.is_grad_enabled() and size <= self.free_bytes:
            self.kept[start, stop] = outputs
            self.free_bytes -= size
        return outputs
