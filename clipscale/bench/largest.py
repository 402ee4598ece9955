"""The largest batch of one device and its host, found by trying: each try is one step of `clipscale train` in a process of its own.

    python -m clipscale.bench.largest --record FILE --run runs/NAME --seconds 540 KEY=VALUE ...

The first batch is what `clipscale plan` predicts to fit in the device's and the host's free memory. The batch grows while steps run and
shrinks while memory is refused; then the gap between the two is halved. FILE (JSON) keeps every try with its reason, and a try of the same
command, code, machine and versions is not made again.
"""

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch

from clipscale.bench.fit import (
    FITS,
    HOW,
    RUN_COLUMNS,
    Attempt,
    Row,
    attempt,
    memory_bars,
    parser,
    phases,
    row_of,
    where,
    within_a_tenth,
)
from clipscale.bench.present import Bars, Benchmark, Column, Curves, cells, finish
from clipscale.bench.record import device_of, earlier, machine, write
from clipscale.cli.main import composed
from clipscale.config.tools import PlanConfig, target_gpu
from clipscale.data.loader.memory import free_memory
from clipscale.errors import UserError
from clipscale.hardware import hardware_of
from clipscale.plan.dry_run import dry_run
from clipscale.plan.memory import PROCESS
from clipscale.plan.planner import MemoryPlan
from clipscale.units import format_bytes, format_count, parse_count

UP, DOWN, HALF = 1.25, 0.1, 0.5
"""What the batch is multiplied with while nothing has been refused; by what part it is lowered while nothing has fitted, twice as much
with every refusal, up to a half."""
CLOSE = 0.03
"""The search ends when the largest that fits and the smallest that does not are this close, in parts of the latter."""
SLOWER = 1.2
"""What a try may take longer than the last one by its samples."""
RESERVE = 0.03
"""Share of the host's free memory that the first try leaves alone."""
LEFT = 2**30
"""Bytes of the host's memory that no try may take, by prediction, lest the system ends what is not ours."""
FURTHEST = 2**21
"""The prediction is a straight line through this batch and its half."""


def search(
    tried: Sequence[Attempt],
    first: int,
    grain: int,
    seconds: float,
    attempted: Callable[[int, float], Attempt],
    hear: Callable[[Attempt], None],
) -> str:
    """Go on from what was tried until the largest batch is known closely, and return what ended the search.

    Batches are multiples of `grain`. `attempted(batch, seconds)` tries one, for so long at most; `hear` gets each try.
    """
    done, end = [t for t in tried if t.status == FITS or t.too_large], time.monotonic() + seconds
    while True:
        size = following(done, first, grain)
        if size is None:
            return "found" if any(t.status == FITS for t in done) else f"not even {grain} samples fit"
        left = end - time.monotonic()
        fitted = [t for t in done if t.status == FITS]
        need = SLOWER * max((t.seconds * max(1.0, size / t.batch) for t in fitted), default=0.0)
        if need > left:
            return f"time: {size} samples would take about {need:.0f} s, and {max(left, 0):.0f} s were left"
        found = attempted(size, left)
        done.append(replace(found, batch=size))
        hear(done[-1])
        if not (found.status == FITS or found.too_large):
            return f"{found.status}: {found.reason}"


def following(tried: Sequence[Attempt], first: int, grain: int) -> int | None:
    """The batch to try next; None where the largest is known."""

    def whole(size: float) -> int:
        return max(grain, int(size) // grain * grain)

    good = max((t.batch for t in tried if t.status == FITS), default=0)
    bad = min((t.batch for t in tried if t.too_large), default=0)
    if not good and not bad:
        return whole(first)
    if not bad:
        return max(whole(UP * good), good + grain)
    if not good:
        part = min(HALF, DOWN * 2 ** (sum(t.too_large for t in tried) - 1))
        return min(whole((1 - part) * bad), bad - grain) if bad > grain else None
    if bad - good <= max(grain, CLOSE * bad):
        return None
    return min(max(whole((good + bad) / 2), good + grain), bad - grain)


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

    def of(self, batch: int) -> tuple[float, float]:
        """Bytes of the device and of the host that a batch takes."""
        device, host = (start + slope * batch for start, slope in zip(self.starts, self.slopes))
        return device, host

    def largest(self, host_bytes: float) -> tuple[int, str]:
        """The largest batch for so many bytes of the host's memory, and what bounds it."""
        budgets = {"device memory": self.device_bytes, "host memory": host_bytes}
        limits = {
            name: (budget - start) / slope
            for (name, budget), start, slope in zip(budgets.items(), self.starts, self.slopes)
            if budget is not None and slope > 0
        }
        name = min(limits, key=lambda name: limits[name])
        return max(0, int(limits[name])), name


def main(argv: Sequence[str] | None = None) -> int:
    """Search, and keep every try. Returns 1 where nothing was found to fit. Raises UserError."""
    options = parser(__doc__)
    options.add_argument("--first", type=parse_count, default=0, help="the batch to begin with, not the predicted one")
    options.add_argument("--grain", type=parse_count, default=4096, help="batches are multiples of it")
    options.add_argument("--memory", type=parse_count, help="bytes a run may take beyond the program itself, on a CPU")
    given, start = options.parse_args(argv), time.monotonic()
    given.record.parent.mkdir(parents=True, exist_ok=True)
    command = ["python", "-m", "clipscale.bench.largest", *(sys.argv[1:] if argv is None else argv)]
    record: Row = {"benchmark": "largest", "settings": {"words": given.words}, "machine": machine(shlex.join(command))}
    record["how"] = HOW
    device = device_of("cpu" if "device=cpu" in given.words else "auto")
    if given.memory and device == "cuda":
        raise UserError(
            "--memory bounds a process's address space, of which CUDA reserves far more than it uses; leave it out"
        )
    before = earlier(given.record, record)
    record |= {"rows": []} | {key: before[key] for key in ("rows", "fits") if key in before}
    prediction = Prediction(given.words, given.grain, device)
    free = free_memory() if given.memory is None else given.memory + PROCESS
    first, bound = prediction.largest((1 - RESERVE) * free)
    memory = {"host_free_bytes": free, "device_room_bytes": prediction.device_bytes}
    record["predicted"] = {"batch": first, "bound": bound} | memory
    print(f"predicted: {first} samples, bound by {bound}")

    def attempted(batch: int, seconds: float) -> Attempt:
        _, on_host = prediction.of(batch)
        if given.memory is None and on_host > free - LEFT:
            reason = f"not tried: {on_host:.4g} of {free:.4g} bytes of host memory, by plan; {LEFT:.3g} stay free"
            return Attempt("refused", reason, 0.0)
        words = [*given.words, f"batch={batch}", f"samples={batch}", "launch.procs=1", "log.progress=false"]
        found = attempt(given.run, words, seconds, given.memory)
        if found.status == FITS:
            command = shlex.join(["clipscale", "train", f"run={given.run}", *words])
            record["fits"] = row_of(given.run, words) | {"status": FITS, "reason": "", "command": command}
        return found

    def hear(one: Attempt) -> None:
        print(f"{one.batch} samples: {one.status} {one.reason} ({one.seconds:.0f} s)", flush=True)
        record["rows"].append(asdict(one))
        write(given.record, record)

    tries = [Attempt(**{key: one[key] for key in ("batch", "status", "reason", "seconds")}) for one in record["rows"]]
    left = given.seconds - (time.monotonic() - start)
    record["ended"] = search(tries, given.first or first, given.grain, left, attempted, hear)
    record["largest"] = max((one["batch"] for one in record["rows"] if one["status"] == FITS), default=None)
    finish(record, given.record)
    return 0 if record["largest"] else 1


# ---- how the record is shown ----

TRY_COLUMNS = (
    Column("samples", "batch", "{:,}".format, case=True),
    Column("what came of it", "status", words=True, case=True),
    Column("seconds", "seconds", "{:.0f}".format),
    Column("why", "reason", words=True),
)


def largest_notes(record: Row) -> list[str]:
    """What was predicted, what was found, and the memory of the largest step beside its prediction."""
    predicted, largest = record["predicted"], record["largest"]
    budgets = {"the host": predicted["host_free_bytes"], "the device": predicted["device_room_bytes"]}
    memory = " and ".join(f"{format_bytes(size)} of {name}" for name, size in budgets.items() if size is not None)
    lines = [
        f"settings: {' '.join(record['settings']['words'])}",
        f"clipscale plan predicted {predicted['batch']:,} samples in {memory}, bound by {predicted['bound']}",
        f"the largest that ran a whole step: {'none' if largest is None else f'{largest:,}'} (ended: {record['ended']})",
    ]
    for line in phases(record["fits"]) if "fits" in record else []:
        _, phase, predicted_mib, measured_mib, ratio, _ = cells(line, RUN_COLUMNS)
        lines.append(f"its memory, {phase}: predicted {predicted_mib}, measured {measured_mib} MiB, ratio {ratio}")
    return lines


def largest_panels(record: Row) -> list[Curves | Bars]:
    """What was tried, and the memory of the largest step that ran."""
    tries: dict[str, list[tuple[float, ...]]] = {}
    for row in record["rows"]:
        tries.setdefault(row["status"], []).append((row["batch"], row["seconds"]))
    found: list[Curves | Bars] = [
        Curves("whole steps tried, seconds", tries, base=None, mark=record["predicted"]["batch"])
    ]
    if "fits" in record:
        pairs = format_count(record["fits"]["steps"][-1]["batch"])
        found.append(memory_bars(record["fits"], f"memory at {pairs} pairs, MiB"))
    return found


BENCHMARKS = {
    "largest": Benchmark(
        lambda record: f"whole steps of one process on {where(record)}",
        lambda _: TRY_COLUMNS,
        largest_notes,
        lambda record: within_a_tenth([record["fits"]] if "fits" in record else []),
        largest_panels,
        lines=lambda record: sorted(record["rows"], key=lambda row: int(row["batch"])),
    ),
}

if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
