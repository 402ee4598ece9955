"""Copies chunks of the host batch to the device. The next copy runs while the last chunk computes."""

from collections import deque
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

AHEAD = 2
"""Chunks on the device at once: the one computed on and the one being copied."""


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all copies: the allocator keeps memory for each stream, so a new one per batch would hoard it."""
    return torch.cuda.Stream(device)


class ChunkLoader:
    """Input of one tower for `GradCache`: chunks of host rows as tensors on the device.

    `read(start, stop)` blocks until the data workers have delivered those rows. On a GPU, copies run on a stream of
    their own, at most `AHEAD` chunks ahead of the computation, so device memory does not grow with the batch. With
    `resident`, every chunk stays on the device for the second pass.
    """

    def __init__(self, read: Callable[[int, int], Tensor], count: int, device: torch.device, *, resident: bool) -> None:
        self.read, self.count, self.device = read, count, device
        self.held: dict[tuple[int, int], Tensor] | None = {} if resident else None
        self.copies = copy_stream(device) if device.type == "cuda" else None
        self.computed: deque[torch.cuda.Event] = deque()

    def __len__(self) -> int:
        return self.count

    def chunk(self, start: int, stop: int) -> Tensor:
        if self.held is not None and (start, stop) in self.held:
            return self.held[start, stop]
        chunk = self.fetch(start, stop)
        if self.held is not None:
            self.held[start, stop] = chunk
        return chunk

    def fetch(self, start: int, stop: int) -> Tensor:
        if self.copies is None:
            return self.read(start, stop)
        compute = torch.cuda.current_stream(self.device)
        self.computed.append(compute.record_event())
        if len(self.computed) >= AHEAD:
            self.computed.popleft().synchronize()
        with torch.cuda.stream(self.copies):
            chunk = self.read(start, stop).to(self.device, non_blocking=True)
        compute.wait_stream(self.copies)
        # The memory belongs to the copy stream; without this it could be handed out again while the computation still
        # reads it.
        chunk.record_stream(compute)
        return chunk
