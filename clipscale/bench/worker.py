"""Measures time and memory in a benchmark's process: probes come first, then cases are timed in interleaved rounds.

`Worker` does what all benchmarks share; each subclasses it with its variants.
"""

import gc
import resource
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from clipscale.bench.harness import Answer, Job


class Meter:
    """Seconds and memory of the parts of one step. `meter("forward")` closes the part that has been running."""

    def __init__(self, device: torch.device, memory: "HostMemory | DeviceMemory | None" = None) -> None:
        self._device, self._memory = device, memory
        self.seconds: dict[str, float] = {}
        self.before: dict[str, int] = {}
        """Bytes held when a part began."""
        self.peak: dict[str, int] = {}
        self._begin()

    def _begin(self) -> None:
        self._held = self._memory.reset() if self._memory else 0
        self._start = time.perf_counter()

    def __call__(self, part: str) -> None:
        wait(self._device)
        self.seconds[part] = time.perf_counter() - self._start
        if self._memory:
            self.before[part], self.peak[part] = self._held, self._memory.peak()
        self._begin()

    def growth(self) -> int:
        """The highest peak beyond what was held when the step began."""
        return max(self.peak.values()) - next(iter(self.before.values()))


class Variant(Protocol):
    """One way to compute what is compared."""

    def inputs(self, size: int) -> Any:
        """What a step of this size needs, on its device."""

    def step(self, inputs: Any, meter: Meter) -> Any:
        """Compute; close every part on the meter."""


class Worker(ABC):
    """Measures the cases of a job. A case that fails is a record with the reason; the others go on."""

    def __init__(self, job: Job, rank: int = 0, leave: Callable[[Answer], object] = lambda _: None) -> None:
        """`leave` takes the answer after every measurement."""
        self.job, self.rank, self._leave, self.complete = job, rank, leave, False
        if job.threads is not None:
            torch.set_num_threads(job.threads)
        self.device = torch.device("cuda", rank) if job.device == "cuda" else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.found: dict[str, dict[str, Any]] = {}

    # A benchmark declares:

    @abstractmethod
    def probe(self, name: str, size: int) -> None:
        """Measure once: the memory of a step, weights, gradients and inputs aside."""

    def variant(self, case: str) -> Variant:
        """One way to compute a timed case."""
        raise KeyError(case)

    def ready(self, case: str) -> None:
        """Warm up a timed case, and set `size` in its record."""
        raise KeyError(case)

    def measured(self, case: str, meter: Meter) -> None:  # noqa: B027, optional
        """Called after every step that is kept."""

    def facts(self) -> dict[str, Any]:
        """Further parts of the answer."""
        return {}

    def meet(self) -> None:  # noqa: B027, optional
        """Return once all ranks are here."""

    # The same for all:

    def work(self) -> Answer:
        if self.device.type == "cpu" and self.job.memory is not None:
            bound_memory(self.job.memory)
        for name, size in self.job.probed:
            self.attempt(name, partial(self.probe, name, size))
        for case in self.job.timed:  # all models first: the largest batch is one that fits beside their weights
            self.attempt(case, partial(self.variant, case))
        for number, case in alternating(self.job.timed, self.job.repeats):
            if number == 0:
                self.attempt(case, partial(self.ready, case))
            self.attempt(case, partial(self.time, case))
        self.complete = True
        self.leave()
        return self.answer()

    def attempt(self, name: str, what: Callable[[], object]) -> None:
        """`what()`, unless the case has failed; or in the record of the case why not."""
        record = self.record(name)
        if record["status"] != "ok":
            return
        try:
            what()
        except Exception as error:
            status = "out of memory" if is_out_of_memory(error) else "failed"
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            record |= {"status": status, "reason": reason, "traceback": traceback.format_exc()}
        self.release()
        self.leave()

    def record(self, name: str) -> dict[str, Any]:
        return self.found.setdefault(name, {"status": "ok", "steps": [], "memory": {}})

    def run(self, variant: Variant, size: int) -> None:
        """One step that is not kept."""
        inputs = variant.inputs(size)
        wait(self.device)
        variant.step(inputs, Meter(self.device))

    def time(self, case: str) -> None:
        """One step, into the record: seconds of its parts, and on CUDA its memory."""
        record, variant = self.record(case), self.variant(case)
        inputs = variant.inputs(record["size"])
        self.release()
        wait(self.device)
        self.meet()
        meter = Meter(self.device, DeviceMemory(self.device) if self.device.type == "cuda" else None)
        variant.step(inputs, meter)
        record["steps"].append(meter.seconds)
        if meter.peak:
            record["memory"][str(record["size"])] = meter.growth()
        self.measured(case, meter)

    def memory(self) -> "HostMemory | DeviceMemory":
        return DeviceMemory(self.device) if self.device.type == "cuda" else HostMemory()

    def release(self) -> None:
        """Free what a step left."""
        gc.collect()

    def answer(self) -> Answer:
        return {"cases": self.found, "complete": self.complete, "threads": torch.get_num_threads()} | self.facts()

    def leave(self) -> None:
        self._leave(self.answer())


def wait(device: torch.device) -> None:
    """Return once the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least, most, and all in their order."""
    return {"median": median(values), "min": min(values), "max": max(values), "all": list(values)}


def alternating(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, name): all names in every round, every second round backwards."""
    for number in range(rounds):
        for name in reversed(names) if number % 2 else names:
            yield number, name


# ---- memory ----


class HostMemory:
    """The resident set of this process."""

    def __init__(self) -> None:
        gc.collect()

    def reset(self) -> int:
        """Bytes held now, from where `peak` counts on."""
        held = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): sets the peak to the present size
        return held

    def peak(self) -> int:
        return _status("VmHWM")


class DeviceMemory:
    """What torch's CUDA allocator has given out."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        torch.cuda.synchronize(device)
        self._device = device

    def reset(self) -> int:
        """Bytes held now, from where `peak` counts on."""
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


def bound_memory(size: int) -> None:
    """Refuse this process more than `size` bytes beyond what it has; a system that lacks memory ends it first (proc(5))."""
    limit, (_, hard) = _status("VmData") + size, resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    Path("/proc/self/oom_score_adj").write_text("1000")


def is_out_of_memory(error: Exception) -> bool:
    """Did an allocation fail, on either device. The last signs are the libraries' own: oneDNN's, and cuBLAS's and cuDNN's."""
    message = str(error)
    signs = ["can't allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc", "out of memory"]
    signs += ["could not create a primitive", "STATUS_ALLOC_FAILED"]
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in message for sign in signs)


def _status(name: str) -> int:
    """A size from proc(5), in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return 1024 * int(line.split()[1])
