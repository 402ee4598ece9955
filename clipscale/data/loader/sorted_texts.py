"""Makes the chunks of texts (captions and hard negatives): sorted by length, each chunk as wide as its longest text.

N: texts of the local batch, T: tokens of the context.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clipscale.common.batch import Span, equal_spans
from clipscale.data.loader.to_device import ChunkLoader, PairLoader, TextLoader

# The most pictures or captions of a pass on a GPU: with more, attention kernels exceed the largest grid.
MAX_SEQUENCES = 2**15
# A chunk's width is a multiple of this, or the context. Tensor cores are fast at such widths, and few shapes occur.
WIDTH_MULTIPLE = 8
# The assumed cost of one more chunk, as a share of the tokens of a full chunk. A chunk ends early where that saves
# more tokens of padding than this.
CHUNK_COST = 1 / 16


def widths_of(lengths: np.ndarray, context: int) -> np.ndarray:
    """Each text's length, at least 1, rounded up to a multiple of WIDTH_MULTIPLE, and at most the context: (N,)."""
    rounded = -(-np.maximum(lengths, 1) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    widths: np.ndarray = np.minimum(rounded, context).astype(np.int16)
    return widths


@dataclass(frozen=True)
class LengthOrder:
    """A batch of texts, and its order by length."""

    # (N, T), in the batch's order, on the host.
    texts: Tensor
    # (N,): the widths, in the order by length.
    widths: np.ndarray
    # (N,) int64: the row of the batch at each position, on the host and on the device.
    host_rows: Tensor
    rows: Tensor


class SortedTexts(TextLoader):
    """A `ReorderedInput` of `GradCache`: chunks of texts of similar length, the longest texts first.

    A chunk holds at most as many tokens as `size` whole contexts, so it takes no more memory than `size` texts of
    full length. Short texts come in larger chunks. All ranks make the same number of chunks. Nothing here waits for
    the device. A captioner's pairs are divided differently: see `has_equal_chunks`.
    """

    def __init__(
        self,
        tokens: Callable[[int, int], Tensor],
        lengths: Callable[[], np.ndarray],
        count: int,
        context_length: int,
        device: torch.device,
        *,
        stays_on_device: bool,
        has_equal_chunks: bool = False,
    ) -> None:
        """`tokens(start, stop)` blocks until those texts have arrived, `lengths()` until all have.

        `has_equal_chunks`: all chunks have equally many texts, and the shortest texts come first. A captioner needs
        both: `SortedPairs` loads the images of the same chunks, which then come in few shapes; and graphs of the first
        chunks are kept, so none is larger than the measured one.
        """
        super().__init__(self._read, count, context_length, device, stays_on_device=stays_on_device)
        self._has_equal_chunks = has_equal_chunks
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
        """Divide the texts, once, into chunks of at most the tokens in `size` whole contexts, or of `size` texts.

        Blocks until all texts have arrived. The methods below need it.
        """
        if not self._spans:
            texts = self._tokens(0, self.count)
            widths = widths_of(self._lengths(), self.context_length)
            by_width = widths if self._has_equal_chunks else -widths
            rows = torch.from_numpy(np.argsort(by_width, kind="stable"))  # equal lengths keep the batch's order
            widths = widths[rows.numpy()]
            rows = rows.pin_memory() if self.copy_stream else rows
            self._length_order = LengthOrder(texts, widths, rows, rows.to(self.device, non_blocking=True))
            if self._has_equal_chunks:
                self._spans = equal_spans(self.count, size)
            else:
                self._spans = chunk_spans(widths, size * self.context_length, max(size, MAX_SEQUENCES))

    def split(self, count: int) -> None:
        """Halve the chunk with the most texts until there are `count`, the largest number of any rank."""
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

    def widths(self) -> dict[int, int]:
        """Width in tokens -> texts that the tower computes at it."""
        widths = Counter[int]()
        for start, stop in self._spans:
            widths[self._width(start, stop)] += stop - start
        return dict(widths)

    def with_images(self, pixels: Callable[[int, int], Tensor]) -> "SortedPairs":
        """The input of a captioner's encoder: the images in the order of the texts."""
        return SortedPairs(pixels, self)

    @property
    def length_order(self) -> LengthOrder:
        """The order of the batch, after `make_chunks`."""
        assert self._length_order is not None
        return self._length_order

    def _width(self, start: int, stop: int) -> int:
        """The width of a chunk: its longest text's."""
        widths = self.length_order.widths
        return int(max(widths[start], widths[stop - 1]))

    def _read(self, start: int, stop: int) -> Tensor:
        return self.gather_in_order(self.length_order.texts[:, : self._width(start, stop)], start, stop)

    def gather_in_order(self, batch: Tensor, start: int, stop: int) -> Tensor:
        """Rows of the batch, on the host, at positions start..stop."""
        size = stop - start, *batch.shape[1:]
        chunk = torch.empty(size, dtype=batch.dtype, pin_memory=self.copy_stream is not None)
        return torch.index_select(batch, 0, self.length_order.host_rows[start:stop], out=chunk)


class SortedPairs(PairLoader):
    """A `ReorderedInput` of a captioner's encoder: images and captions of the same samples, in the texts' order."""

    def __init__(self, pixels: Callable[[int, int], Tensor], texts: SortedTexts) -> None:
        """`pixels(start, stop)` blocks until those images have arrived."""
        count = len(texts)
        images = ChunkLoader(
            lambda start, stop: texts.gather_in_order(pixels(0, count), start, stop),
            count,
            texts.device,
            stays_on_device=texts.stays_on_device,
        )
        super().__init__(images, texts)
        self.spans = texts.spans
        self.rows = texts.rows


def chunk_spans(widths: np.ndarray, budget: int, most: int) -> list[Span]:
    """Chunks of texts of falling width: at most `budget` tokens and `most` texts each, at least one text."""
    spans = []
    start = 0
    while start < len(widths):
        max_texts = max(1, min(budget // int(widths[start]), most))
        stop = start + texts_of_chunk(widths[start : start + max_texts].astype(np.int64), CHUNK_COST * budget)
        spans.append((start, stop))
        start = stop
    return spans


def texts_of_chunk(widths: np.ndarray, cost: float) -> int:
    """The number of texts in the next chunk: the number that saves the most padding.

    If that saves at most `cost` tokens, the chunk takes all texts.
    """
    count = len(widths)
    saved = (count - np.arange(count)) * (widths[0] - widths)  # tokens, if the chunk ends before this text
    best = int(saved.argmax())
    return best if saved[best] > cost else count
