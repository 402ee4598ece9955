"""Makes the chunks of captions: sorted by length, each chunk as wide as its longest caption.

N: samples of the local batch, T: tokens of the context.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clipscale.batch.chunks import Span, equal_spans
from clipscale.common.hardware import MAX_SEQUENCES
from clipscale.data.loader.to_device import ChunkLoader, PairLoader

# A chunk's width is a multiple of this, or the context. Tensor cores are fast at such widths, and few shapes occur.
WIDTH_MULTIPLE = 8
# The assumed cost of one more chunk, as a share of the tokens of a full chunk. A chunk ends early where that saves
# more tokens of padding than this.
CHUNK_COST = 1 / 16


def widths_of(lengths: np.ndarray, context: int) -> np.ndarray:
    """Each caption's length, at least 1, rounded up to a multiple of WIDTH_MULTIPLE, and at most the context: (N,)."""
    rounded = -(-np.maximum(lengths, 1) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    widths: np.ndarray = np.minimum(rounded, context).astype(np.int16)
    return widths


@dataclass(frozen=True)
class LengthOrder:
    """A batch of captions, and its order by length."""

    # (N, T), in the batch's order, on the host.
    captions: Tensor
    # (N,): the widths, in the order by length.
    widths: np.ndarray
    # (N,) int64: the row of the batch at each position, on the host and on the device.
    host_rows: Tensor
    rows: Tensor


class SortedCaptions(ChunkLoader):
    """A `ReorderedInput` of `GradCache`: chunks of captions of similar length, the longest captions first.

    A chunk holds at most as many tokens as `size` whole contexts, so it takes no more memory than `size` captions of
    full length. Short captions come in larger chunks. All ranks make the same number of chunks. Nothing here waits for
    the device. A captioner's pairs are divided differently: see `has_images`.
    """

    def __init__(
        self,
        tokens: Callable[[int, int], Tensor],
        lengths: Callable[[], np.ndarray],
        count: int,
        device: torch.device,
        *,
        is_resident: bool,
        has_images: bool = False,
    ) -> None:
        """`tokens(start, stop)` blocks until those captions have arrived, `lengths()` until all have.

        `has_images`: `SortedPairs` loads the images of the same chunks. Then all chunks have equally many captions, so
        that images come in few shapes. The shortest captions come first: graphs of the first chunks are kept, so none
        is larger than the measured one.
        """
        super().__init__(self._read, count, device, is_resident=is_resident)
        self._has_images = has_images
        self._tokens = tokens
        self._lengths = lengths
        # None before `make_chunks`.
        self._length_order: LengthOrder | None = None
        self._spans: list[Span] = []

    @property
    def num_chunks(self) -> int:
        """The number of chunks; 0 before `make_chunks`."""
        return len(self._spans)

    def make_chunks(self, size: int) -> None:
        """Divide the captions, once, into chunks of at most the tokens in `size` whole contexts, or of `size` captions.

        Blocks until all captions have arrived. The methods below need it.
        """
        if not self._spans:
            captions = self._tokens(0, self.count)
            context = captions.shape[1]
            widths = widths_of(self._lengths(), context)
            by_width = widths if self._has_images else -widths
            rows = torch.from_numpy(np.argsort(by_width, kind="stable"))  # equal lengths keep the batch's order
            widths = widths[rows.numpy()]
            rows = rows.pin_memory() if self.copy_stream else rows
            self._length_order = LengthOrder(captions, widths, rows, rows.to(self.device, non_blocking=True))
            if self._has_images:
                self._spans = equal_spans(self.count, size)
            else:
                self._spans = chunk_spans(widths, size * context, max(size, MAX_SEQUENCES))

    def split(self, count: int) -> None:
        """Halve the chunk with the most captions until there are `count`, the largest number of any rank."""
        spans = self._spans
        while len(spans) < count:
            i = max(range(len(spans)), key=lambda i: spans[i][1] - spans[i][0])
            start, stop = spans[i]
            middle = (start + stop + 1) // 2
            spans[i : i + 1] = [(start, middle), (middle, stop)]

    def spans(self, size: int) -> list[Span]:
        """The chunks as ranges of positions in the sorted order."""
        self.make_chunks(size)
        return self._spans

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows of the batch at positions start..stop, (stop - start,) int64, on the device."""
        return self.length_order.rows[start:stop]

    def widths(self) -> Counter[int]:
        """Width -> captions that the tower computes at it."""
        widths = Counter[int]()
        for start, stop in self._spans:
            widths[self._width(start, stop)] += stop - start
        return widths

    @property
    def length_order(self) -> LengthOrder:
        """The order of the batch, after `make_chunks`."""
        assert self._length_order is not None
        return self._length_order

    def _width(self, start: int, stop: int) -> int:
        """The width of a chunk: its longest caption's."""
        widths = self.length_order.widths
        return int(max(widths[start], widths[stop - 1]))

    def _read(self, start: int, stop: int) -> Tensor:
        return self.gather_in_order(self.length_order.captions[:, : self._width(start, stop)], start, stop)

    def gather_in_order(self, batch: Tensor, start: int, stop: int) -> Tensor:
        """Rows of the batch, on the host, at positions start..stop."""
        size = stop - start, *batch.shape[1:]
        chunk = torch.empty(size, dtype=batch.dtype, pin_memory=self.copy_stream is not None)
        return torch.index_select(batch, 0, self.length_order.host_rows[start:stop], out=chunk)


class SortedPairs(PairLoader):
    """A `ReorderedInput` of a captioner's encoder: images and captions of the same samples, in the captions' order."""

    def __init__(self, pixels: Callable[[int, int], Tensor], captions: SortedCaptions) -> None:
        """`pixels(start, stop)` blocks until those images have arrived."""
        count = len(captions)
        images = ChunkLoader(
            lambda start, stop: captions.gather_in_order(pixels(0, count), start, stop),
            count,
            captions.device,
            is_resident=captions.resident_chunks is not None,
        )
        super().__init__(images, captions)
        self.spans = captions.spans
        self.rows = captions.rows


def chunk_spans(widths: np.ndarray, budget: int, most: int) -> list[Span]:
    """Chunks of captions of falling width: at most `budget` tokens and `most` captions each, at least one caption."""
    spans = []
    start = 0
    while start < len(widths):
        max_captions = max(1, min(budget // int(widths[start]), most))
        stop = start + captions_of_chunk(widths[start : start + max_captions].astype(np.int64), CHUNK_COST * budget)
        spans.append((start, stop))
        start = stop
    return spans


def captions_of_chunk(widths: np.ndarray, cost: float) -> int:
    """The number of captions in the next chunk: the number that saves the most padding.

    If that saves at most `cost` tokens, the chunk takes all captions.
    """
    count = len(widths)
    saved = (count - np.arange(count)) * (widths[0] - widths)  # tokens, if the chunk ends before this caption
    best = int(saved.argmax())
    return best if saved[best] > cost else count
