"""A tower of which only the projection trains: its frozen trunk runs once a step, and its features are kept."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clipscale.step.grad_cache import Arranged, Chunked


class TrunkFeatures:
    """The input of the projection: a trunk's features (N, W) of `inputs`, computed by chunks in the first pass.

    The second pass gets the same rows, and reads no pixels or tokens. The trunk draws no random numbers.
    """

    def __init__(self, inputs: Chunked, trunk: Callable[[Any], Tensor], autocast: Callable[[], Any]) -> None:
        self.inputs, self.trunk, self.autocast = inputs, trunk, autocast
        self.kept: dict[tuple[int, int], Tensor] = {}
        if isinstance(inputs, Arranged):
            self.spans, self.rows = inputs.spans, inputs.rows

    def __len__(self) -> int:
        return len(self.inputs)

    def chunk(self, start: int, stop: int) -> Tensor:
        if (start, stop) not in self.kept:
            with torch.no_grad(), self.autocast():
                self.kept[start, stop] = self.trunk(self.inputs.chunk(start, stop))
        return self.kept[start, stop]
