"""Measures in a benchmark's process: probes come first, then every case warms up, then cases are timed in interleaved rounds.

`Worker` does what all benchmarks share; each subclasses it with its variants.
"""

import gc
import math
import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch

from clipscale.bench.harness import Answer, Job
from clipscale.bench.memory import DeviceMemory, HostMemory, bound_memory, is_out_of_memory

CLOCK = "CLIPSCALE_BENCH_CLOCK"
"""Environment variable: `cpu` counts this process's processor time instead of the wall clock's."""


def clock() -> float:
    """Seconds, from any start."""
    return time.process_time() if os.environ.get(CLOCK) == "cpu" else time.perf_counter()


class Meter:
    """Seconds and memory of the parts of one step. `meter("forward")` closes the part that has been running."""

    def __init__(self, device: torch.device, memory: HostMemory | DeviceMemory | None = None) -> None:
        self._device, self._memory = device, memory
        self.seconds: dict[str, float] = {}
        self.before: dict[str, int] = {}
        """Bytes held when a part began."""
        self.peak: dict[str, int] = {}
        self._begin()

    def _begin(self) -> None:
        self._held = self._memory.reset() if self._memory else 0
        self._start = clock()

    def __call__(self, part: str) -> None:
        wait(self._device)
        self.seconds[part] = clock() - self._start
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
        self.job, self.rank, self._leave, self.complete = job, rank, leave, False
        if job.threads is not None:
            torch.set_num_threads(job.threads)
        self.device = torch.device("cuda", rank) if job.device == "cuda" else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.start = time.monotonic()
        self.end = self.start + (math.inf if job.seconds is None else job.seconds)
        self.found: dict[str, dict[str, Any]] = {}
        self.expected: dict[str, float] = {}
        """Case -> seconds of its last step, or an estimate. A case that is not in it is not timed (any more)."""

    # A benchmark declares:

    @abstractmethod
    def probe(self, name: str, size: int) -> None:
        """Measure once: the memory of a step, weights, gradients and inputs aside."""

    def variant(self, case: str) -> Variant:
        """One way to compute a timed case."""
        raise KeyError(case)

    def ready(self, case: str) -> None:
        """Warm up a timed case, and set its step's `expected` seconds."""
        raise KeyError(case)

    def measured(self, case: str, meter: Meter) -> None:  # noqa: B027, optional
        """Called after every step that is kept."""

    def finish(self) -> None:  # noqa: B027, optional
        """Called after the last round."""

    def facts(self) -> dict[str, Any]:
        """Further parts of the answer."""
        return {}

    def late(self, case: str) -> bool:
        """Does the case take so long to get ready that the others are timed once before."""
        return False

    def agreed(self, value: float) -> float:
        """The largest value of any rank."""
        return value

    def meet(self) -> None:
        """Return once all ranks are here."""
        wait(self.device)

    # The same for all:

    def work(self) -> Answer:
        if self.device.type == "cpu" and self.job.memory is not None:
            bound_memory(self.job.memory)
        for name, size in self.job.probed:
            self.attempt(name, partial(self.probe, name, size))
        for case in self.job.timed:  # all models first: the largest batch is one that fits beside their weights
            self.attempt(case, partial(self.variant, case))
        for late in (False, True):
            cases = [case for case in self.job.timed if self.late(case) == late]
            for case in cases:
                self.attempt(case, partial(self.ready, case))
            order = sorted(self.expected, key=lambda case: self.agreed(self.expected[case]))
            self.round([case for case in order if case in cases])
        for number in range(1, self.job.repeats):
            spent = time.monotonic() - self.start
            if self.agreed(spent - self.job.share * (self.end - self.start)) < 0:
                self.round(self.job.timed if number % 2 == 0 else self.job.timed[::-1])
        self.finish()
        self.complete = True
        self.leave()
        return self.answer()

    def round(self, cases: Sequence[str]) -> None:
        """One step of each case that is still to be timed."""
        for case in cases:
            if case in self.expected:
                self.attempt(case, partial(self.time, case))

    def attempt(self, name: str, what: Callable[[], object]) -> None:
        """`what()`, or in the record of the case why not."""
        record = self.record(name)
        if record["status"] != "ok":
            return
        try:
            what()
        except Exception as error:
            status = "out of memory" if is_out_of_memory(error) else "failed"
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            record |= {"status": status, "reason": reason, "traceback": traceback.format_exc()}
            self.expected.pop(name, None)
        self.release()
        self.leave()

    def record(self, name: str) -> dict[str, Any]:
        return self.found.setdefault(name, {"status": "ok", "steps": [], "memory": {}})

    def affords(self, case: str, seconds: float) -> bool:
        """Is there time for a step of so many seconds; if not, a case without a measurement is recorded as not run."""
        left = self.end - time.monotonic()
        if self.agreed(seconds - left) <= 0:
            return True
        record = self.record(case)
        if not record["steps"]:
            reason = f"a step would take about {seconds:.3g} s, and {max(left, 0):.0f} s were left"
            record |= {"status": "not run", "reason": reason, "traceback": "", "expected_s": seconds}
        self.expected.pop(case, None)
        return False

    def seconds(self, variant: Variant, size: int) -> float:
        """Of one step that is not kept."""
        inputs = variant.inputs(size)
        wait(self.device)
        meter = Meter(self.device)
        variant.step(inputs, meter)
        return sum(meter.seconds.values())

    def time(self, case: str) -> None:
        """One step, into the record: seconds of its parts, and on CUDA its memory."""
        if not self.affords(case, self.expected[case]):
            return
        record, variant = self.record(case), self.variant(case)
        inputs = variant.inputs(record["size"])
        self.release()
        self.meet()
        meter = Meter(self.device, DeviceMemory(self.device) if self.device.type == "cuda" else None)
        variant.step(inputs, meter)
        record["steps"].append(meter.seconds)
        self.expected[case] = sum(meter.seconds.values())
        if meter.peak:
            record["memory"][str(record["size"])] = meter.growth()
        self.measured(case, meter)

    def memory(self) -> HostMemory | DeviceMemory:
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
        for name in names if number % 2 else reversed(names):
            yield number, name
