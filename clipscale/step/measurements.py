"""Measurements of a step: time and memory of its parts, and numbers read from the device.

Times and numbers are read without waiting for what the device has queued later.
"""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import psutil
import torch
from torch import Tensor
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
        # On a CPU: the seconds of each part.
        self._cpu_seconds: dict[str, float] = {}
        # On a GPU: the events before and after each part.
        self._events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        timed = self._timed_on_gpu(name) if self._cuda else self._timed_on_cpu(name)
        with timed, record_function(name):  # the part's name in a profiler's timeline
            yield

    @contextmanager
    def _timed_on_cpu(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._cpu_seconds[name] = time.perf_counter() - started

    @contextmanager
    def _timed_on_gpu(self, name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(self.device)
        self.bytes_before[name] = torch.cuda.memory_allocated(self.device)
        started = self._recorded_event()
        yield
        self._events[name] = (started, self._recorded_event())
        self.peak_bytes[name] = torch.cuda.max_memory_allocated(self.device)

    def _recorded_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of each part, to be read after the last one. On a GPU this waits until that part has run there."""
        if not self._cuda:
            return dict(self._cpu_seconds)
        for _, ended in self._events.values():
            ended.synchronize()
        return {name: started.elapsed_time(ended) / 1e3 for name, (started, ended) in self._events.items()}

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


@dataclass(frozen=True)
class Readback:
    """Numbers on their way from the device to the host. Reading waits for them, not for what was queued later."""

    # The numbers, in memory of the host.
    values: Tensor
    # The event after which the values are there; None if they are there already.
    arrival: torch.cuda.Event | None = None

    @classmethod
    def start_scalars(cls, *scalars: Tensor) -> "Readback":
        """Begin to copy scalars, after what the device has in its queue."""
        return cls.start_tensor(torch.stack([scalar.detach().double() for scalar in scalars]))

    @classmethod
    def start_tensor(cls, values: Tensor) -> "Readback":
        """Begin to copy a tensor, after what the device has in its queue. A tensor of the host is not copied."""
        if values.device.type != "cuda":
            return cls(values)
        on_host = values.to("cpu", non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record()
        return cls(on_host, arrival)

    @property
    def is_ready(self) -> bool:
        """Whether reading would not wait."""
        return self.arrival is None or self.arrival.query()

    def wait(self) -> Tensor:
        """The values, when they are on the host."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.values

    def read(self) -> list[float]:
        """The numbers of `start_scalars`, as floats. Waits for them."""
        return [float(value) for value in self.wait().tolist()]
