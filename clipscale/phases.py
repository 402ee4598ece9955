"""Seconds and peak device memory of the parts of one optimizer step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Phases:
    """`with phases("encode"): ...` for each part. A CPU has no allocator to ask: its memory figures are None."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.before: dict[str, int] = {}
        self.peak: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before[name] = torch.cuda.memory_allocated(self.device)
        started = time.perf_counter()
        yield
        if cuda:
            torch.cuda.synchronize(self.device)
            self.peak[name] = torch.cuda.max_memory_allocated(self.device)
        self.seconds[name] = time.perf_counter() - started

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def peak_bytes(self) -> int | None:
        """Highest allocation of any part."""
        return max(self.peak.values()) if self.peak else None

    def extra_bytes(self, name: str) -> int | None:
        """What one part allocated beyond what was there when it began."""
        return self.peak[name] - self.before[name] if name in self.peak else None
