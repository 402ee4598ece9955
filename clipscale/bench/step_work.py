"""What the step benchmark measures in a fresh process: memory at several batches, the largest batch that fits, and time."""

import time
from collections.abc import Callable
from typing import Any

import torch

from clipscale.bench.harness import Job, Task
from clipscale.bench.memory import is_out_of_memory, next_batch
from clipscale.bench.step_variants import Name, StepVariant, StepVariants
from clipscale.bench.worker import Meter, Worker

FIRST = 64
"""The first batch that is tried to find the largest that fits."""
CLOSE = 1 / 8
"""The largest batch is known to this share."""
SEARCH = 0.1
"""Share of the time left that one trial may take."""
COMPILING = 60.0
"""Seconds that compiling two towers may take on a CUDA device."""
WARM = 2
"""Chunks that warm a method up."""


def work(task: Task) -> None:
    StepWorker(Job(**task.job), task.rank, task.leave).work()


class StepWorker(Worker):
    """Cases are METHOD@BATCH, or METHOD@max for the largest batch that fits."""

    def __init__(self, job: Job, rank: int = 0, leave: Callable[[dict[str, Any]], object] = lambda _: None) -> None:
        super().__init__(job, rank, leave)
        self.variants = StepVariants(device=job.device, **job.about)

    def facts(self) -> dict[str, Any]:
        return {"pinned": self.variants.pinned}

    def variant(self, case: str) -> StepVariant:
        return self.variants.variant(case.partition("@")[0])

    def late(self, case: str) -> bool:
        return Name.of(case).kind == "compiled"

    def release(self) -> None:
        """Gradients go, too."""
        for weights in self.variants.weights:
            weights.zero_grad()
        super().release()

    # ---- what is measured ----

    def probe(self, name: str, size: int) -> None:
        variant = self.variant(name)
        self.seconds(variant, min(self.variants.chunk, size))
        for weights in self.variants.weights:
            weights.zero_grad(set_to_none=False)
        inputs = variant.inputs(size)
        meter = Meter(self.device, self.memory())
        variant.step(inputs, meter)
        self.record(name)["memory"][str(size)] = meter.growth()

    def ready(self, case: str) -> None:
        """A few chunks warm up and say what a step takes; or the largest batch is found."""
        size, record = case.partition("@")[2], self.record(case)
        if self.late(case) and self.device.type == "cuda" and not self.affords(case, COMPILING):
            return
        if size == "max":
            self.find_largest(case)
            return
        record["size"] = batch = int(size)
        few = min(WARM * self.variants.chunk, batch)
        self.seconds(self.variant(case), few)
        self.expected[case] = self.seconds(self.variant(case), few) * batch / few
        self.affords(case, self.expected[case])

    def find_largest(self, case: str) -> None:
        """The largest batch whose step runs.

        Compiled towers take that of the same method without compiling: every new size would be compiled anew.
        """
        name, record = Name.of(case), self.record(case)
        if name.kind == "compiled":
            twin = f"{name.base}@max"
            if "size" not in self.record(twin):
                self.find_largest(twin)
            record |= {"size": self.record(twin)["size"], "tried": {}}
            for _ in ("compile", "measure"):
                self.expected[case] = self.seconds(self.variant(case), record["size"])
            return
        good, bad, step_s = 0, 0, 0.0
        record["tried"] = {}
        first = min(FIRST, self.variants.chunk)
        while size := next_batch(good, bad, first, grain=1, factor=2, close=CLOSE):
            if step_s * size / max(good, 1) > SEARCH * (self.end - time.monotonic()):
                record["bound"] = "time"
                break
            found = self.fits(self.variant(case), size)
            record["tried"][size] = "out of memory" if found is None else f"{found:.3g} s"
            good, bad, step_s = (good, size, step_s) if found is None else (size, bad, found)
        if good:
            record["size"], self.expected[case] = good, step_s
        elif "bound" in record:
            record |= {"status": "not run", "reason": "no time was left", "traceback": ""}
        else:
            raise MemoryError("out of memory: not even a step of one sample fits")

    def fits(self, variant: StepVariant, batch: int) -> float | None:
        """Seconds of a step; None if memory does not suffice."""
        try:
            return self.seconds(variant, batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        finally:
            self.clear()
        return None

    def clear(self) -> None:
        """Release, and give the allocator's unused blocks back."""
        self.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def time(self, case: str) -> None:
        """If a batch that fitted alone does not fit beside the other methods, an eighth less is tried."""
        record = self.record(case)
        try:
            super().time(case)
            return
        except Exception as error:
            if not is_out_of_memory(error) or not case.endswith("@max") or record["size"] < FIRST // 4:
                raise
        record["tried"][record["size"]] = "out of memory between the others"
        record["size"] -= record["size"] // 8
        record["steps"] = []
        self.clear()
        self.time(case)

    def measured(self, case: str, meter: Meter) -> None:
        record, batch = self.record(case), self.record(case)["size"]
        flops = self.variant(case).flops
        record["flops"] = flops.per_sample
        record["mfu"] = flops.utilisation(batch / sum(meter.seconds.values()))
        if len(meter.seconds) > 1:
            record["parts"] = {f"{part}_s": seconds for part, seconds in meter.seconds.items()}
            record["parts"]["features_bytes"] = self.variants.features_bytes(batch)
            record["parts"] |= {f"mem_{part}_bytes": meter.peak[part] - meter.before[part] for part in meter.peak}
