"""Rows of the host batch on their way to the device: one chunk at a time, the next copy running while the last chunk computes."""

from collections import deque
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

AHEAD = 2
"""Chunks that may be on the device at once: the one computed and the one being copied."""


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream for copies: of a new one for every batch, the allocator would hoard the chunks' memory 32 times over."""
    return torch.cuda.Stream(device)


class ChunkLoader:
    """Input of one tower for `GradCache`: chunks of host rows as tensors on the device.

    `rows(start, stop)` blocks until those rows have arrived from the loader; rows that are decoded on the device are there already. On a
    GPU copies run on a stream of their own, at most `AHEAD` chunks beyond the computation, so that device memory does not grow with the
    batch. `resident` keeps every chunk there for the second pass instead. `passing` rows are overwritten when rows have been asked for
    twice more: on a CPU, where nothing copies them to a device, they are copied, since a kept graph may hold on to them.
    """

    def __init__(
        self,
        rows: Callable[[int, int], Tensor],
        count: int,
        device: torch.device,
        *,
        resident: bool,
        passing: bool = False,
    ) -> None:
        self.rows, self.count, self.device, self.passing = rows, count, device, passing
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
            return self.rows(start, stop).clone() if self.passing else self.rows(start, stop)
        compute = torch.cuda.current_stream(self.device)
        self.computed.append(compute.record_event())
        if len(self.computed) >= AHEAD:
            self.computed.popleft().synchronize()
        with torch.cuda.stream(self.copies):
            # rows that are decoded on the device are made there, on this stream
            chunk = self.rows(start, stop).to(self.device, non_blocking=True)
        compute.wait_stream(self.copies)
        # The memory belongs to the copy stream; without this it could be handed out again while the computation still reads it.
        chunk.record_stream(compute)
        return chunk
