"""The largest batch of one device and its host: a bisection around what `clipscale plan` predicts, each try one step of `clipscale train`.

    python -m clipscale.bench.largest --record FILE --run runs/NAME --seconds 540 KEY=VALUE ...

FILE (JSON) keeps every try as `clipscale.bench.fit` keeps runs; a try of the same command, code, machine and versions is not made again.
"""

import sys
import time
from collections.abc import Callable, Sequence

import torch

from clipscale.bench.fit import Row, begun, parser, trained
from clipscale.bench.memory import next_batch
from clipscale.bench.present import finish
from clipscale.bench.record import device_of, write
from clipscale.cli.main import composed
from clipscale.config.tools import PlanConfig, target_gpu
from clipscale.data.loader.memory import free_memory
from clipscale.errors import UserError
from clipscale.hardware import hardware_of
from clipscale.plan.dry_run import dry_run
from clipscale.plan.planner import MemoryPlan
from clipscale.units import parse_count

FACTOR = 1.25
"""By this the batch grows while nothing has been refused, and shrinks while nothing has fitted."""
CLOSE = 0.03
"""The search ends when the smallest batch that does not fit is this close to the largest that does, as a share of the former."""
SLOWER = 1.2
"""A try may take longer than the last one by its samples, and by this factor."""
RESERVE = 0.03
"""Share of the host's free memory that the first try leaves free."""
LEFT = 2**30
"""Bytes of the host's memory that every try leaves free, by prediction, so that the system does not end other programs."""
FURTHEST = 2**21
"""The prediction is a straight line through this batch and its half."""
TOO_LARGE = ("refused", "out of memory")


def search(rows: list[Row], first: int, grain: int, seconds: float, attempt: Callable[[int, float], Row]) -> str:
    """Add tries to `rows` until the largest batch is known closely; return what ended the search.

    Batches are multiples of `grain`. `attempt(batch, seconds)` tries one, for so long at most.
    """
    end = time.monotonic() + seconds
    while True:
        fitted = [row for row in rows if row["status"] == "ok"]
        good = max((row["batch"] for row in fitted), default=0)
        bad = min((row["batch"] for row in rows if row["status"] in TOO_LARGE), default=0)
        size = next_batch(good, bad, first, grain=grain, factor=FACTOR, close=CLOSE)
        if size is None:
            return "found" if good else f"not even {grain} samples fit"
        left = end - time.monotonic()
        need = SLOWER * max((row["seconds"] * max(1.0, size / row["batch"]) for row in fitted), default=0.0)
        if need > left:
            return f"time: {size} samples would take about {need:.0f} s, and {max(left, 0):.0f} s were left"
        row = attempt(size, left) | {"batch": size}
        rows.append(row)
        if row["status"] not in ("ok", *TOO_LARGE):
            return f"{row['status']}: {row['reason']}"


class Prediction:
    """What `clipscale plan` predicts of any batch with these settings, on this device: straight lines from a few chunks on."""

    def __init__(self, words: Sequence[str], grain: int, device: str) -> None:
        """Raises UserError for settings that cannot be."""
        name = (hardware_of(torch.cuda.get_device_name(0)) or "") if device == "cuda" else "cpu"
        config = composed("plan", [*words, f"batch={grain}", f"samples={grain}", f"hardware={name}"])
        assert isinstance(config, PlanConfig)
        gpu = target_gpu(config)
        with dry_run(config, 1, gpu.capability if gpu else None) as run:
            plan = MemoryPlan(config, gpu, run)
            self.device_bytes: int | None = None if gpu is None else int(plan.usable)
            ends = [self.needs(plan, batch) for batch in (FURTHEST // 2, FURTHEST)]
        self.slopes = [(b - a) / (FURTHEST // 2) for a, b in zip(*ends)]
        self.starts = [a - slope * (FURTHEST // 2) for a, slope in zip(ends[0], self.slopes)]

    @staticmethod
    def needs(plan: MemoryPlan, batch: int) -> tuple[int, int]:
        """Bytes of the device and of the host; on a CPU the latter holds all."""
        on_device, on_host = plan.total(plan.at(batch)), plan.host(batch).node
        return (on_device, on_host) if plan.gpu else (0, on_host + on_device)

    def on_host(self, batch: int) -> float:
        """Bytes of the host that a batch takes."""
        return self.starts[1] + self.slopes[1] * batch

    def largest(self, host_bytes: float) -> tuple[int, str]:
        """The largest batch for so many bytes of the host's memory, and what bounds it."""
        budgets = {"device memory": self.device_bytes, "host memory": host_bytes}
        return min(
            (max(0, int((budget - start) / slope)), name)
            for (name, budget), start, slope in zip(budgets.items(), self.starts, self.slopes)
            if budget is not None and slope > 0
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Search, and keep every try. Returns 1 if nothing was found to fit. Raises UserError."""
    options = parser(__doc__)
    options.add_argument("--first", type=parse_count, default=0, help="the batch to begin with, not the predicted one")
    options.add_argument("--grain", type=parse_count, default=4096, help="batches are multiples of it")
    given, start = options.parse_args(argv), time.monotonic()
    command = ["python", "-m", "clipscale.bench.largest", *(sys.argv[1:] if argv is None else argv)]
    record = begun(given.record, command, words=given.words)
    record["rows"] = [row for row in record["rows"] if row["status"] in ("ok", *TOO_LARGE)]
    device, free = device_of("cpu" if "device=cpu" in given.words else "auto"), free_memory()
    prediction = Prediction(given.words, given.grain, device)
    first, bound = prediction.largest((1 - RESERVE) * free)
    record["predicted"] = {"batch": first, "bound": bound, "host_free_bytes": free}
    print(f"predicted: {first} samples, bound by {bound}")

    def attempt(batch: int, seconds: float) -> Row:
        words = [*given.words, f"batch={batch}", f"samples={batch}", "launch.procs=1", "log.progress=false"]
        run = given.run.with_name(f"{given.run.name}-{batch}")
        need = prediction.on_host(batch)
        if need > free - LEFT:
            reason = f"not tried: {need:.4g} of {free:.4g} bytes of host memory, by plan; {LEFT:.3g} stay free"
            row = {"run": run.name, "settings": words, "status": "refused", "reason": reason, "seconds": 0.0}
        else:
            row = trained(run, words, seconds)
        print(f"{batch} samples: {row['status']} {row['reason']} ({row['seconds']:.0f} s)", flush=True)
        write(given.record, record | {"rows": [*record["rows"], row | {"batch": batch}]})
        return row

    left = given.seconds - (time.monotonic() - start)
    ended = search(record["rows"], given.first or first, given.grain, left, attempt)
    largest = max((row["batch"] for row in record["rows"] if row["status"] == "ok"), default=None)
    record |= {"largest": largest, "ended": ended}
    record["notes"] = [f"predicted by clipscale plan: {first:,} samples, bound by {bound}"]
    record["notes"] += [f"largest that ran a whole step: {largest or 'none'} (ended: {ended})"]
    finish(record, given.record)
    return 0 if largest else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
