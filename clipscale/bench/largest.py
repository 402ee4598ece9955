"""The largest batch of one device and its host: found by trying, each try a whole step of `clipscale train` in a process of its own.

    python -m clipscale.bench.largest --record FILE --model vit-b32 --seconds 540 KEY=VALUE ...

The first batch is what `clipscale plan` holds possible on the device and in the free memory of the host; from there it goes up while steps
run and down while memory is refused, then between the two. Every try is in the record with its reason, and one that is there already, of
the same command, code, machine and versions, is not made again.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from clipscale.bench import runs_table
from clipscale.bench.figures import device_of
from clipscale.bench.largest_draw import draw
from clipscale.bench.machine import facts
from clipscale.bench.records import earlier, write
from clipscale.bench.runs import HOW, Attempt, attempt, row_of
from clipscale.bench.sheet import Sheet, publish
from clipscale.bench.verdicts import of_plan
from clipscale.cli.main import composed
from clipscale.config.tools import PlanConfig, target_gpu
from clipscale.data.loader.memory import free_memory
from clipscale.errors import UserError
from clipscale.hardware import hardware_of
from clipscale.plan.dry_run import dry_run
from clipscale.plan.memory import PROCESS
from clipscale.plan.planner import MemoryPlan
from clipscale.report.table import plain_console
from clipscale.units import format_bytes, parse_count

Row = dict[str, Any]

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
FITS = "ok"


@dataclass(frozen=True)
class Try:
    """A batch and what came of it."""

    batch: int
    status: str
    reason: str
    seconds: float

    @property
    def too_large(self) -> bool:
        return self.status in ("refused", "out of memory")


def search(
    tried: Sequence[Try],
    first: int,
    grain: int,
    seconds: float,
    attempted: Callable[[int, float], Attempt],
    tell: Callable[[Try], None],
) -> str:
    """Go on from what was tried until the largest batch is known closely, and return what ended the search.

    Batches are multiples of `grain`. `attempted(batch, seconds)` tries one, for so long at most; `tell` hears of each.
    """
    done, end = [t for t in tried if t.status == FITS or t.too_large], time.monotonic() + seconds
    while True:
        size = following(done, first, grain)
        if size is None:
            return "found" if any(t.status == FITS for t in done) else f"not even {grain} samples fit"
        left = end - time.monotonic()
        fitted = [t for t in done if t.status == FITS]
        need = SLOWER * max(t.seconds * max(1.0, size / t.batch) for t in fitted) if fitted else 0.0
        if need > left:
            return f"time: {size} samples would take about {need:.0f} s, and {max(left, 0):.0f} s were left"
        found = attempted(size, left)
        done.append(Try(size, found.status, found.reason, found.seconds))
        tell(done[-1])
        if not (found.status == FITS or found.too_large):
            return f"{found.status}: {found.reason}"


def following(tried: Sequence[Try], first: int, grain: int) -> int | None:
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
    """What `clipscale plan` holds of any batch with these settings, on this device."""

    def __init__(self, words: Sequence[str], grain: int, device: str) -> None:
        """Raises UserError for settings that cannot be."""
        name = (hardware_of(torch.cuda.get_device_name(0)) or "") if device == "cuda" else "cpu"
        config = composed("plan", [*words, f"batch={grain}", f"samples={grain}", f"hardware={name}"])
        assert isinstance(config, PlanConfig)
        gpu = target_gpu(config)
        with dry_run(config, 1, gpu.capability if gpu else None) as run:
            plan = MemoryPlan(config, gpu, run)
            self.room: int | None = None if gpu is None else int(plan.usable)
            ends = [self.needs(plan, batch) for batch in (FURTHEST // 2, FURTHEST)]
        # both are straight lines in the batch, from a few chunks on
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

    def largest(self, host: float) -> tuple[int, str]:
        """The largest batch for `host` bytes of the host's memory, and what bounds it."""
        rooms = {"device memory": self.room, "host memory": host}
        limits = {
            name: (room - start) / slope
            for (name, room), start, slope in zip(rooms.items(), self.starts, self.slopes)
            if room is not None and slope > 0
        }
        name = min(limits, key=lambda name: limits[name])
        return max(0, int(limits[name])), name


def main(argv: Sequence[str] | None = None) -> int:
    """Search, telling each try, and keep the record. Returns 1 where nothing was found to fit."""
    given = arguments(argv)
    start = time.monotonic()
    device = device_of("cpu" if "device=cpu" in given.words else "auto")
    if given.memory and device == "cuda":
        raise UserError(
            "--memory bounds a process's address space, of which CUDA reserves far more than it uses; leave it out"
        )
    words = sys.argv[1:] if argv is None else argv
    record: Row = {
        "benchmark": "largest",
        "settings": {"words": given.words},
        "machine": facts(shlex.join(["python", "-m", "clipscale.bench.largest", *words])),
        "how": HOW,
        "rows": [],
    }
    given.record.parent.mkdir(parents=True, exist_ok=True)
    before = earlier(given.record, record)
    record |= {key: before[key] for key in ("rows", "fits") if key in before}
    prediction = Prediction(given.words, given.grain, device)
    free = free_memory() if given.memory is None else given.memory + PROCESS
    first, bound = prediction.largest((1 - RESERVE) * free)
    record["predicted"] = {
        "batch": first,
        "bound": bound,
        "host_free_bytes": free,
        "device_room_bytes": prediction.room,
    }
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

    def tell(one: Try) -> None:
        print(f"{one.batch} samples: {one.status} {one.reason} ({one.seconds:.0f} s)", flush=True)
        record["rows"].append(asdict(one))
        write(given.record, record)

    tries = [Try(**{key: one[key] for key in ("batch", "status", "reason", "seconds")}) for one in record["rows"]]
    left = given.seconds - (time.monotonic() - start)
    record["ended"] = search(tries, given.first or first, given.grain, left, attempted, tell)
    record["largest"] = max((one["batch"] for one in record["rows"] if one["status"] == FITS), default=None)
    record["verdicts"] = of_plan([record["fits"]] if "fits" in record else [])
    write(given.record, record)
    present(record, given.record, plain_console())
    return 0 if record["largest"] else 1


def present(record: Row, path: Path, console: Console) -> None:
    """Table and picture of the record at `path`, printed and beside it."""
    publish(table(record), [*legend(record), *record["verdicts"]], path, partial(draw, record), console)


def table(record: Row) -> Sheet:
    """A line for each try, smallest first."""
    title = f"whole steps of one process on {runs_table.where(record)}"
    heads = ("samples", "what came of it", "seconds", "why")
    rows = sorted(record["rows"], key=lambda row: int(row["batch"]))
    lines = [[f"{row['batch']:,}", row["status"], f"{row['seconds']:.0f}", row["reason"]] for row in rows]
    return Sheet(title, heads, ("what came of it", "why"), [lines])


def legend(record: Row) -> list[str]:
    """What was foreseen, what was found, and the memory of the largest step beside its prediction."""
    foreseen, largest = record["predicted"], record["largest"]
    rooms = {"the host": foreseen["host_free_bytes"], "the device": foreseen["device_room_bytes"]}
    room = " and ".join(f"{format_bytes(size)} of {name}" for name, size in rooms.items() if size is not None)
    lines = [
        f"settings: {' '.join(record['settings']['words'])}",
        f"clipscale plan foresaw {foreseen['batch']:,} samples in {room}, bound by {foreseen['bound']}",
        f"the largest that ran a whole step: {'none' if largest is None else f'{largest:,}'} (ended: {record['ended']})",
    ]
    if "fits" in record:
        for _, phase, *sizes, ratio, _ in runs_table.lines(record["fits"]):
            lines.append(f"its memory, {phase}: predicted {sizes[0]}, measured {sizes[1]} MiB, ratio {ratio}")
    return lines


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="the JSON file to write, or to go on with")
    parser.add_argument(
        "--run", type=Path, default=Path("runs/largest"), help="folder of the runs, removed before each"
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="for the whole search")
    parser.add_argument(
        "--first", type=parse_count, default=0, help="the batch to begin with, instead of the predicted"
    )
    parser.add_argument("--grain", type=parse_count, default=4096, help="batches are multiples of it")
    parser.add_argument(
        "--memory", type=parse_count, help="bytes that a run may take beyond the program itself, on a CPU"
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="settings of clipscale train, the batch aside")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
