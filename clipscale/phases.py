"""Times the parts of one optimizer step and measures their device memory."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function


class Phases:
    """`with phases("encode"): ...` around each part. Memory figures are None on a CPU, which has no allocator statistics."""

    def __init__(self, device: torch.device, entered: Callable[[str], None] = lambda name: None) -> None:
        """`entered` is called with the name of every part that begins."""
        self.device, self.entered = device, entered
        self.seconds: dict[str, float] = {}
        self.before: dict[str, int] = {}
        self.peak: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.entered(name)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before[name] = torch.cuda.memory_allocated(self.device)
        started = time.perf_counter()
        with record_function(name):  # its name in a profiler's timeline
            yield
        if cuda:
            torch.cuda.synchronize(self.device)
            self.peak[name] = torch.cuda.max_memory_allocated(self.device)
        self.seconds[name] = time.perf_counter() - started

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def peak_bytes(self) -> int | None:
        """Highest allocation in any part."""
        return max(self.peak.values()) if self.peak else None

    def extra_bytes(self, name: str) -> int | None:
        """One part's peak beyond the allocation at its start."""
        return self.peak[name] - self.before[name] if name in self.peak else None

    def record(self) -> dict[str, float | int | None]:
        """Seconds and bytes of all parts, by the names in `metrics.jsonl`."""
        return {
            "step_s": self.total,
            **{f"{name}_s": seconds for name, seconds in self.seconds.items()},
            "mem_peak_bytes": self.peak_bytes(),
            **{f"mem_{name}_bytes": self.extra_bytes(name) for name in self.seconds},
        }
