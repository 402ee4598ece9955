"""What the step benchmark measures, in a fresh process: `python -m clipscale.bench.step_work FOLDER RANK` does the job in FOLDER.

The answer is written anew after every measurement, so that a job cut off leaves what it has.
"""

import gc
import math
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clipscale.bench.memory import DeviceMemory, HostMemory, bound_memory, is_out_of_memory
from clipscale.bench.processes import job_in, leave
from clipscale.bench.step_ways import Name, Way, Ways

FIRST = 64
"""The first batch that is tried where the largest that fits is looked for."""
HALVINGS = 3
"""How often the gap between a batch that fits and one that does not is halved: the largest is known to an eighth."""
SEARCH = 0.1
"""Part of the time left that one trial may take."""
COMPILING = 60.0
"""Seconds that compiling two towers may take on a CUDA device."""
WARM = 2
"""Chunks that warm a method up."""


@dataclass
class StepJob:
    """What one process is to do."""

    model: str
    chunk: int
    precision: str
    device: str
    probed: list[tuple[str, int]] = field(default_factory=list)
    """Methods and batches whose memory is wanted."""
    timed: list[str] = field(default_factory=list)
    """Cases, `METHOD@BATCH` or `METHOD@max`, whose time is wanted, in turns."""
    repeats: int = 0
    seconds: float | None = None
    """What would not end within so many seconds from the start is left out."""
    memory: int | None = None
    """Bytes that the process may take on a CPU beyond what torch itself takes."""


class StepWork:
    """A job in its process."""

    def __init__(self, job: StepJob, folder: Path | None = None) -> None:
        self.job, self.folder, self.complete = job, folder, False
        self.end = time.monotonic() + (math.inf if job.seconds is None else job.seconds)
        self.ways = Ways(job.model, job.chunk, job.precision, job.device)
        self.device = self.ways.device
        self.found: dict[str, dict[str, Any]] = {}
        self.expected: dict[str, float] = {}
        """Seconds of one step of a case, by its last one or by a smaller one."""

    def do(self) -> dict[str, Any]:
        if self.device.type == "cpu" and self.job.memory is not None:
            bound_memory(self.job.memory)
        for name, batch in self.job.probed:
            self.attempt(name, partial(self.probe, batch=batch))
        for case in self.job.timed:  # all models first: the largest batch is one that fits beside their weights
            self.attempt(case, lambda case: self.way(case))
        compiled = [case for case in self.job.timed if case.startswith("compiled")]
        for cases in ([case for case in self.job.timed if case not in compiled], compiled):
            for case in cases:  # what has to be compiled comes when the rest has been measured once
                self.attempt(case, self.ready)
            self.turns(sorted((case for case in cases if case in self.expected), key=lambda case: self.expected[case]))
        for number in range(1, self.job.repeats):
            self.turns(self.job.timed if number % 2 == 0 else self.job.timed[::-1])
        self.complete = True
        self.leave()
        return self.answer()

    def turns(self, cases: list[str]) -> None:
        """One step of each case that is still to be measured."""
        for case in cases:
            if case in self.expected and self.job.repeats:
                self.attempt(case, self.time)

    def answer(self) -> dict[str, Any]:
        how = {"threads": torch.get_num_threads(), "pinned": self.ways.pinned}
        return {"methods": self.found, "complete": self.complete} | how

    def leave(self) -> None:
        if self.folder is not None:
            leave(self.folder, self.answer())

    def record(self, name: str) -> dict[str, Any]:
        return self.found.setdefault(name, {"status": "ok", "seconds": [], "memory": {}})

    def attempt(self, name: str, what: Callable[[str], object]) -> None:
        """`what(name)`, or in the record why not."""
        record = self.record(name)
        if record["status"] != "ok":
            return
        try:
            what(name)
        except Exception as error:
            status = "out of memory" if is_out_of_memory(error) else "failed"
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            record |= {"status": status, "reason": reason, "traceback": traceback.format_exc()}
            self.expected.pop(name, None)
        self.release()
        self.leave()

    def release(self) -> None:
        """Hand back what a step left: gradients, and with a full device the allocator's blocks."""
        for weights in self.ways.weights:
            weights.zero_grad()
        gc.collect()

    def way(self, case: str) -> Way:
        return self.ways.way(case.partition("@")[0])

    def affords(self, case: str, seconds: float) -> bool:
        """Is there time for a step of so many seconds; else it is noted, unless the case has a measurement already."""
        left = self.end - time.monotonic()
        if seconds <= left:
            return True
        record = self.record(case)
        if not record["seconds"]:
            reason = f"a step would take about {seconds:.3g} s, and {max(left, 0):.0f} s were left"
            record |= {"status": "not run", "reason": reason, "traceback": "", "expected_s": seconds}
        self.expected.pop(case, None)
        return False

    # ---- what is measured ----

    def probe(self, name: str, batch: int) -> None:
        """Growth of the peak during one step, weights, gradients and inputs aside."""
        way = self.way(name)
        way.step(way.inputs(min(self.job.chunk, batch)))
        for weights in self.ways.weights:
            weights.zero_grad(set_to_none=False)
        inputs = way.inputs(batch)
        memory = DeviceMemory(self.device) if self.device.type == "cuda" else HostMemory()
        way.step(inputs)
        self.record(name)["memory"][str(batch)] = memory.growth()

    def ready(self, case: str) -> None:
        """Find the batch where the largest is asked for, warm up, and learn from a few chunks how long a step will take."""
        name, _, size = case.partition("@")
        record = self.record(case)
        if name.startswith("compiled") and self.device.type == "cuda" and not self.affords(case, COMPILING):
            return
        if size == "max":
            self.find_largest(case, record)
            return
        record["batch"] = batch = int(size)
        few = min(WARM * self.job.chunk, batch)
        _ = self.step(self.way(name), few)
        seconds = self.step(self.way(name), few)
        self.expected[case] = seconds * batch / few
        self.affords(case, self.expected[case])

    def find_largest(self, case: str, record: dict[str, Any]) -> None:
        """The largest batch whose step runs: doubled until memory (or the time for a trial) is full, then the gap halved.

        Compiled towers take that of the same method as it is: every new size would be compiled anew.
        """
        name = Name.of(case.partition("@")[0])
        twin = f"{name.base}@max" if name.variant == "compiled" else case
        if twin != case:
            if "batch" not in self.record(twin):
                self.find_largest(twin, self.record(twin))
            record |= {"batch": (batch := self.record(twin)["batch"]), "tried": {}}
            _ = self.step(self.way(case), batch)
            self.expected[case] = self.step(self.way(case), batch)
            return
        tried: dict[int, str] = {}
        good, bad, step_s, size = 0, 0, 0.0, min(FIRST, self.job.chunk)
        for _ in range(64):
            if step_s * size / max(good, 1) > SEARCH * (self.end - time.monotonic()):
                record["bound"] = "time"
                break
            found = self.fits(self.way(case), size)
            tried[size] = "out of memory" if found is None else f"{found:.3g} s"
            good, bad, step_s = (good, size, step_s) if found is None else (size, bad, found)
            if bad and (bad - good) * 2**HALVINGS <= bad:
                break
            size = (good + bad) // 2 if bad else 2 * size
        record["tried"] = tried
        if not good:
            raise MemoryError(f"out of memory: not even a step of {size} samples fits")
        record["batch"], self.expected[case] = good, step_s

    def fits(self, way: Way, batch: int) -> float | None:
        """Seconds of a step; None where memory does not suffice."""
        try:
            return self.step(way, batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        finally:
            self.release()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return None

    def step(self, way: Way, batch: int) -> float:
        """Seconds of one step."""
        inputs = way.inputs(batch)
        self.wait()
        start = time.perf_counter()
        way.step(inputs)
        self.wait()
        return time.perf_counter() - start

    def time(self, case: str) -> None:
        """Seconds, memory and parts of a step. Where what fitted by itself does not between the others, an eighth less is tried."""
        if not self.affords(case, self.expected[case]):
            return
        record = self.record(case)
        try:
            self.measure(case, record)
            return
        except Exception as error:
            if not is_out_of_memory(error) or not case.endswith("@max") or record["batch"] < FIRST // 4:
                raise
        record["tried"][record["batch"]] = "out of memory between the others"
        record["batch"] -= record["batch"] // 8
        record["seconds"] = []
        self.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.time(case)

    def measure(self, case: str, record: dict[str, Any]) -> None:
        way = self.way(case)
        inputs = way.inputs(record["batch"])
        self.release()
        cuda = self.device.type == "cuda"
        memory = DeviceMemory(self.device) if cuda else None
        self.wait()
        start = time.perf_counter()
        phases = way.step(inputs)
        self.wait()
        seconds = time.perf_counter() - start
        record["seconds"].append(seconds)
        self.expected[case] = seconds
        record["flops"] = way.flops.per_sample
        record["mfu"] = way.flops.utilisation(record["batch"] / seconds)
        peak = None if memory is None else memory.growth()
        if phases is not None:
            record["parts"] = {f"{part}_s": s for part, s in phases.seconds.items()}
            record["parts"]["features_bytes"] = self.ways.features_bytes(record["batch"])
            record["parts"] |= {f"mem_{part}_bytes": phases.extra_bytes(part) for part in phases.peak}
            if phases.peak:
                peak = max(phases.peak.values()) - phases.before["encode"]
        if peak is not None:
            record["memory"][str(record["batch"])] = peak

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def main(folder: Path) -> int:
    record = job_in(folder)
    job = StepJob(**record | {"probed": [tuple(pair) for pair in record["probed"]]})
    StepWork(job, folder).do()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
