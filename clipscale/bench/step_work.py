"""What the step benchmark measures in a fresh process: memory at several batches, the largest batch that fits, and time."""

from collections.abc import Callable
from typing import Any

import torch

from clipscale.bench.harness import Job, Task
from clipscale.bench.memory import is_out_of_memory
from clipscale.bench.step_variants import Name, StepVariant, StepVariants
from clipscale.bench.worker import Meter, Worker

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
            self.find_largest(case, record)
            return
        record["size"] = batch = int(size)
        few = min(WARM * self.variants.chunk, batch)
        self.seconds(self.variant(case), few)
        self.expected[case] = self.seconds(self.variant(case), few) * batch / few
        self.affords(case, self.expected[case])

    def find_largest(self, case: str, record: dict[str, Any]) -> None:
        """The largest batch whose step runs: doubled until memory (or the time for a trial) is full, then the gap halved.

        Compiled towers take that of the same method without compiling: every new size would be compiled anew.
        """
        name = Name.of(case)
        twin = f"{name.base}@max" if name.kind == "compiled" else case
        if twin != case:
            if "size" not in self.record(twin):
                self.find_largest(twin, self.record(twin))
            record |= {"size": (batch := self.record(twin)["size"]), "tried": {}}
            self.seconds(self.variant(case), batch)
            self.expected[case] = self.seconds(self.variant(case), batch)
            return
        tried: dict[int, str] = {}
        good, bad, step_s, size = 0, 0, 0.0, min(FIRST, self.variants.chunk)
        for _ in range(64):
            if step_s * size / max(good, 1) > SEARCH * self.left:
                record["bound"] = "time"
                break
            found = self.fits(self.variant(case), size)
            tried[size] = "out of memory" if found is None else f"{found:.3g} s"
            good, bad, step_s = (good, size, step_s) if found is None else (size, bad, found)
            if bad and (bad - good) * 2**HALVINGS <= bad:
                break
            size = (good + bad) // 2 if bad else 2 * size
        record["tried"] = tried
        if not good and "bound" in record:
            record |= {"status": "not run", "reason": "no time was left", "traceback": ""}
            return
        if not good:
            raise MemoryError(f"out of memory: not even a step of {size} samples fits")
        record["size"], self.expected[case] = good, step_s

    def fits(self, variant: StepVariant, batch: int) -> float | None:
        """Seconds of a step; None where memory does not suffice."""
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
        """Where a batch that fitted alone does not fit beside the other methods, an eighth less is tried."""
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
