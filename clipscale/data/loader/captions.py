"""The text tower's chunks: captions in order of their length, and each chunk no wider than its longest caption.

N: samples of the local batch, T: tokens of the context.
"""

from collections import Counter
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from clipscale.data.loader.to_device import ChunkLoader

GRAIN = 8
"""Chunks are a multiple of this wide: tensor cores like that, and torch.compile sees few shapes."""
MOST = 2**15
"""Most captions of a chunk, beyond which attention kernels exceed the largest grid."""
CHUNK_COST = 1 / 16
"""What one more chunk is assumed to cost, in full chunks. Where cutting saves more padding, a chunk ends early."""


def lengths(tokens: Tensor, pad: int) -> Tensor:
    """(N, T) -> (N,) int64: tokens up to the last that is no padding, in steps of GRAIN, at least one, at most T."""
    width = tokens.shape[1]
    used = torch.arange(1, width + 1).where(tokens != pad, 0).amax(dim=1)
    return (used + GRAIN - 1).div(GRAIN, rounding_mode="floor").clamp(min=1).mul(GRAIN).clamp(max=width)


class SortedCaptions(ChunkLoader):
    """An input of `GradCache` in chunks of captions of like length, longest first; features are in the batch's order.

    Chunks hold as many tokens as `size` whole contexts do. So they take the memory of a chunk of `size` captions, and
    short captions come in larger chunks, each as wide as its first caption. All ranks make equally many chunks.
    """

    def __init__(
        self,
        tokens: Callable[[int, int], Tensor],
        count: int,
        device: torch.device,
        *,
        pad: int,
        resident: bool,
        most: Callable[[int], int] = lambda chunks: chunks,
    ) -> None:
        """`tokens(start, stop)` blocks until those captions have arrived; the first chunk needs all of them.

        `most(chunks)` is the largest of all ranks' numbers of chunks; every rank calls it once.
        """
        super().__init__(self._cut, count, device, resident=resident)
        self._tokens = tokens
        self._pad = pad
        self._most = most
        self._spans: list[tuple[int, int]] = []

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor, list[int]]:
        """The captions; the row at each position; and the length there. Equal lengths keep the batch's order."""
        captions = self._tokens(0, self.count)
        sizes, order = lengths(captions, self._pad).sort(descending=True, stable=True)
        return captions, order, sizes.tolist()

    @cached_property
    def _rows(self) -> Tensor:
        return self._sorted[1].to(self.device)

    def spans(self, size: int) -> list[tuple[int, int]]:
        """The chunks as ranges of positions, for chunks of `size` captions of the whole context."""
        captions, _, sizes = self._sorted
        self._spans = cut(sizes, size * captions.shape[1], max(size, MOST))
        split(self._spans, self._most(len(self._spans)))
        return self._spans

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows of the batch at positions start..stop, (stop - start,) int64, on the device."""
        return self._rows[start:stop]

    def widths(self) -> Counter[int]:
        """Captions by the width at which the tower has computed them."""
        widths: Counter[int] = Counter()
        for start, stop in self._spans:
            widths[self._sorted[2][start]] += stop - start
        return widths

    def _cut(self, start: int, stop: int) -> Tensor:
        captions, order, sizes = self._sorted
        return captions[order[start:stop], : sizes[start]]


def cut(sizes: list[int], budget: int, most: int) -> list[tuple[int, int]]:
    """Chunks of captions of falling `sizes`, of at most `budget` tokens and `most` captions, but at least one."""
    spans, start = [], 0
    while start < len(sizes):
        stop = min(start + max(1, min(budget // sizes[start], most)), len(sizes))
        stop = early(sizes, start, stop, CHUNK_COST * budget)
        spans.append((start, stop))
        start = stop
    return spans


def split(spans: list[tuple[int, int]], count: int) -> None:
    """Halve the chunk with the most captions, in place, until there are `count` chunks."""
    while len(spans) < count:
        i = max(range(len(spans)), key=lambda i: spans[i][1] - spans[i][0])
        start, stop = spans[i]
        middle = (start + stop + 1) // 2
        spans[i : i + 1] = [(start, middle), (middle, stop)]


def early(sizes: list[int], start: int, stop: int, cost: float) -> int:
    """Where a chunk of falling `sizes` ends: at the drop that saves the most padding, if more than `cost` tokens."""
    drops = [i for i in range(start + 1, stop) if sizes[i] < sizes[i - 1]]
    saved = {i: (stop - i) * (sizes[start] - sizes[i]) for i in drops}
    best = max(drops, key=saved.__getitem__, default=stop)
    return best if saved.get(best, 0) > cost else stop
