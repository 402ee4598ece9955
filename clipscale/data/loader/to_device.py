"""Copies chunks of the host batch to the device. A copy runs while the previous chunk computes."""

from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

# Chunks on the device at once: one that computes and one that is copied.
CHUNKS_ON_DEVICE = 2
# Small chunks on the device at once. They compute quickly, so there are more: the device needs work while the host
# begins the next tower.
SMALL_CHUNKS_ON_DEVICE = 4
# A chunk of at most this many bytes is small.
SMALL_BYTES = 8 << 20


@cache
def shared_copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all copies: the allocator keeps freed memory per stream, so new streams would waste it."""
    return torch.cuda.Stream(device)


class Images(Protocol):
    """The images of a captioner's pairs."""

    def __len__(self) -> int: ...

    def chunk(self, start: int, stop: int) -> Tensor | tuple[Tensor, Tensor]:
        """Pixels on the device, or the frozen tower's outputs for them."""


class PairLoader:
    """Input of a captioner's encoder: images and captions of the same samples, in the batch's order."""

    def __init__(self, images: Images, texts: "TextLoader") -> None:
        self.images = images
        self.texts = texts

    def __len__(self) -> int:
        return len(self.images)

    def chunk(self, start: int, stop: int) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
        """Images and tokens on the device."""
        return self.images.chunk(start, stop), self.texts.chunk(start, stop)


class ChunkLoader:
    """Input of one tower for `GradCache`: chunks of host rows as tensors on the device.

    `read(start, stop)` blocks until the data workers have delivered those rows. On a GPU, copies have their own stream,
    and at most CHUNKS_ON_DEVICE chunks, or SMALL_CHUNKS_ON_DEVICE small ones, are on the device. So its memory does not
    grow with the batch. With `stays_on_device`, every chunk stays on the device for the second pass.
    """

    def __init__(
        self, read: Callable[[int, int], Tensor], count: int, device: torch.device, *, stays_on_device: bool
    ) -> None:
        self.read = read
        self.count = count
        self.device = device
        self.stays_on_device = stays_on_device
        # The chunks that stay on the device; None if none does.
        self.resident_chunks: dict[tuple[int, int], Tensor] | None = {} if stays_on_device else None
        self.copy_stream = shared_copy_stream(device) if device.type == "cuda" else None
        # One event for each chunk on the device. The compute stream records it before the chunk's copy begins. Once it
        # has completed, the kernels of all earlier chunks have run.
        self.events: deque[torch.cuda.Event] = deque()
        self.most_on_device = CHUNKS_ON_DEVICE

    def __len__(self) -> int:
        return self.count

    def chunk(self, start: int, stop: int) -> Tensor:
        """The rows start..stop on the device."""
        if self.resident_chunks is None:
            return self.copy_to_device(start, stop)
        if (start, stop) not in self.resident_chunks:
            self.resident_chunks[start, stop] = self.copy_to_device(start, stop)
        return self.resident_chunks[start, stop]

    def copy_to_device(self, start: int, stop: int) -> Tensor:
        """The rows on the device: on a GPU a new copy, on a CPU what `read` returns, such as a view of the batch.

        The host waits while too many chunks are on the device.
        """
        if self.copy_stream is None:
            return self.read(start, stop)
        compute = torch.cuda.current_stream(self.device)
        self.events.append(compute.record_event())
        while len(self.events) >= self.most_on_device:
            self.events.popleft().synchronize()
        with torch.cuda.stream(self.copy_stream):
            chunk = self.read(start, stop).to(self.device, non_blocking=True)
        self.most_on_device = SMALL_CHUNKS_ON_DEVICE if chunk.nbytes <= SMALL_BYTES else CHUNKS_ON_DEVICE
        compute.wait_stream(self.copy_stream)
        # The memory belongs to the copy stream: without this the allocator could reuse it while the chunk computes.
        chunk.record_stream(compute)
        return chunk


class TextLoader(ChunkLoader):
    """Input of the text tower: texts in the batch's order, each with all tokens of the context.

    `SortedTexts` has them in another order, and without padding.
    """

    def __init__(
        self,
        read: Callable[[int, int], Tensor],
        count: int,
        context_length: int,
        device: torch.device,
        *,
        stays_on_device: bool,
    ) -> None:
        super().__init__(read, count, device, stays_on_device=stays_on_device)
        self.context_length = context_length

    @property
    def num_chunks(self) -> int:
        """The number of this rank's chunks; 0 if it is the same on all ranks, which then need not agree on it."""
        return 0

    def split(self, count: int) -> None:
        """Make `count` chunks, the largest number of any rank."""

    def widths(self) -> dict[int, int]:
        """Width in tokens -> texts that the tower computes at it."""
        return {self.context_length: self.count}

    def with_images(self, pixels: Callable[[int, int], Tensor]) -> PairLoader:
        """The input of a captioner's encoder. `pixels(start, stop)` blocks until those images have arrived."""
        return PairLoader(ChunkLoader(pixels, self.count, self.device, stays_on_device=self.stays_on_device), self)
