"""Times the parts of one optimizer step, and measures their device memory."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import psutil
import torch
from torch.profiler import record_function

# The least time that counts as passed: a virtual machine's clock may show the same time twice.
CLOCK_STEP_S = 1e-6


class StepTimer:
    """Times the parts of a step: `with timer("encode"): ...`. On a CPU memory is None: torch keeps no statistics there.

    On a GPU, parts are timed where they run, by events in its queue. Nothing waits before the times are read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self.bytes_before: dict[str, int] = {}
        self.peak_bytes: dict[str, int] = {}
        self._spans: dict[str, tuple[Any, Any]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.bytes_before[name] = torch.cuda.memory_allocated(self.device)
        started = self._now()
        with record_function(name):  # its name in a profiler's timeline
            yield
        self._spans[name] = (started, self._now())
        if self._cuda:
            self.peak_bytes[name] = torch.cuda.max_memory_allocated(self.device)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of each part, to be read after the last one. On a GPU this waits until that part has run there."""
        if not self._cuda:
            return {name: ended - started for name, (started, ended) in self._spans.items()}
        for _, ended in self._spans.values():
            ended.synchronize()
        return {name: started.elapsed_time(ended) / 1e3 for name, (started, ended) in self._spans.items()}

    @property
    def total(self) -> float:
        """Seconds of all parts together. Work between the parts is not counted."""
        return max(sum(self.seconds.values()), CLOCK_STEP_S)

    def working_bytes(self, graph_bytes: int) -> int:
        """The working memory of a step: the most that it needed beyond what stays. Call it without gradients.

        On a GPU it is the largest of these:

        - the peak of `encode` and of `replay`, less the allocation at the step's start and `graph_bytes`, the bytes of
          a chunk's graph;
        - the peak of `loss`, less the allocation at the step's start;
        - the peak of `optim`, less the allocation now: the first update makes the optimizer's state, which stays.

        On a CPU it is the process's peak, less what it holds now.
        """
        if self._cuda:
            before = self.bytes_before["encode"]
            start = {"loss": before, "optim": torch.cuda.memory_allocated(self.device)}
            return max(size - start.get(name, before + graph_bytes) for name, size in self.peak_bytes.items())
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return max(0, peak - psutil.Process().memory_info().rss)

    def record(self) -> dict[str, float | int | None]:
        """Seconds, the highest allocation, and each part's peak beyond its start, by the names in `metrics.jsonl`."""
        peak = self.peak_bytes
        before = self.bytes_before
        return {
            "step_s": self.total,
            **{f"{name}_s": seconds for name, seconds in self.seconds.items()},
            "mem_peak_bytes": max(peak.values(), default=None),
            **{f"mem_{name}_bytes": peak[name] - before[name] if name in peak else None for name in self.seconds},
        }
