"""What fits: whole training runs beside `clipscale plan`, and the largest batch of one device and its host.

    python -m clipscale.bench.fit --record FILE --run runs/NAME --seconds 60 KEY=VALUE ...

adds a run to FILE (JSON): the command of `clipscale train`, the last steps, the evaluation, and predicted beside measured memory. With
--largest it searches the largest batch instead. The first batch is what `clipscale plan` predicts to fit; each try is one step of
`clipscale train` in a process of its own. What FILE holds already, of the same command, code, machine and versions, is not run again.
"""

import argparse
import json
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from clipscale.bench import harness
from clipscale.bench.harness import Task
from clipscale.bench.memory import bound_address_space, end_first, is_out_of_memory
from clipscale.bench.present import MIB, Bars, Benchmark, Column, Curves, cells, finish, lookup, mebibytes
from clipscale.bench.record import device_of, earlier, final, machine, processor, write
from clipscale.bench.targets import Found, Target
from clipscale.cli.main import composed
from clipscale.config.tools import PlanConfig, target_gpu
from clipscale.data.loader.memory import free_memory
from clipscale.errors import UserError
from clipscale.hardware import hardware_of
from clipscale.plan.compare import compare
from clipscale.plan.dry_run import dry_run
from clipscale.plan.memory import PROCESS
from clipscale.plan.planner import MemoryPlan
from clipscale.units import format_bytes, format_count, parse_count

Row = dict[str, Any]

STEPS = 3
"""Steps at the end of a run that are kept."""
GRACE = 20.0
"""Seconds that an interrupted run has to end."""
TENTH = 0.1
"""What predicted memory may be off by, in parts of the measured."""
REFUSALS = ("are free for each of", "larger than foreseen", "was killed by SIGKILL", "samples fit the device")
"""What the program's own refusals for lack of memory contain (data/loader, autotune)."""
FITS = "ok"
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
HOW = {
    "predicted": "clipscale plan run=RUN: a dry run of the step without memory, for the settings and the machine of the run",
    "measured": "medians over the steps from the second on; encode, loss, replay, optim: peak of torch's CUDA allocator in that part of "
    "the step beyond what was there when it began; peak: of the whole step; host: resident memory of rank 0",
    "ratio": "predicted over measured; a CPU has no allocator to ask, so of a run on one the host's alone is measured",
}


# ---- one run in a process of its own ----


@dataclass(frozen=True)
class Attempt:
    """How a run ended."""

    status: str
    """`ok`; `refused`: the program found that memory does not suffice; `out of memory`; `no time`; `failed`: anything else."""
    reason: str
    seconds: float
    batch: int = 0
    """Of a try in the search for the largest batch."""

    @property
    def too_large(self) -> bool:
        return self.status in ("refused", "out of memory")


def attempt(run: Path, words: Sequence[str], seconds: float, memory: int | None = None) -> Attempt:
    """`clipscale train run=RUN WORDS...` in a fresh process, begun anew, for `seconds` at most.

    `memory`: bytes of address space that it may take beyond what the program itself takes; not with CUDA, which reserves more than that.
    """
    shutil.rmtree(run, ignore_errors=True)
    start = time.monotonic()
    job = {"words": [f"run={run}", *words], "memory": memory}
    (ended,) = harness.run("clipscale.bench.fit:work", job, seconds=max(1.0, seconds), grace=GRACE)
    if ended.status is None:
        status, reason = "no time", f"not done within {seconds:.0f} s"
    elif ended.answer:
        status, reason = ended.answer["status"], ended.answer["reason"]
    else:
        status, reason = ended.cause
    return Attempt(status, reason, time.monotonic() - start)


def work(task: Task) -> None:
    """The run, in its process; leaves its status and the reason."""
    from clipscale.cli import main as cli

    job = task.job
    end_first()
    if job["memory"] is not None:
        import_module("clipscale.train")  # the program itself does not count
        bound_address_space(job["memory"])
    try:
        code = cli.dispatch(["train", *job["words"]])
        status, reason = ("ok", "") if code == 0 else ("failed", f"status {code}")
    except Exception as error:
        traceback.print_exc()
        status, reason = judged(error)
    task.leave({"status": status, "reason": reason})


def judged(error: Exception) -> tuple[str, str]:
    """Status and reason of a run that raised."""
    reason = " ".join(str(error).split())[:300]
    if isinstance(error, UserError):
        return ("refused" if any(sign in reason for sign in REFUSALS) else "failed"), reason
    return ("out of memory" if is_out_of_memory(error) else "failed"), f"{type(error).__name__}: {reason}"


def row_of(run: Path, words: Sequence[str]) -> Row:
    """What a record keeps of a run that ended well: last steps, newest evaluation, and prediction beside measurement."""
    steps = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = max((run / "eval").glob("step_*.json"), default=None)
    return {
        "run": run.name,
        "settings": list(words),
        "steps": steps[-STEPS:],
        "evaluated": None if evaluated is None else json.loads(evaluated.read_text()),
        "predicted": compare(PlanConfig(run=str(run))),
    }


def add_run(record: Row, given: argparse.Namespace) -> int:
    """Run, and add the row. Returns 1 where the run did not end well."""
    record["rows"] = earlier(given.record, record).get("rows", [])
    same = [row for row in record["rows"] if row["run"] == given.run.name]
    if any(final(row) and row["settings"] == given.words for row in same):
        print(f"{given.run.name}: recorded already")
        return 0
    found = attempt(given.run, given.words, given.seconds)
    row = row_of(given.run, given.words) if found.status == FITS else {"run": given.run.name, "settings": given.words}
    row |= {"status": found.status, "reason": found.reason, "seconds": found.seconds}
    record["rows"] = [*(other for other in record["rows"] if other not in same), row]
    finish(record, given.record)
    return 0 if found.status == "ok" else 1


# ---- the largest batch ----


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


def find_largest(record: Row, given: argparse.Namespace) -> int:
    """Search, and keep every try. Returns 1 where nothing was found to fit."""
    start = time.monotonic()
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


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 where no run ended well; the record has the reason. Raises UserError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = partial(parser.add_argument, metavar="N")
    option("--record", type=Path, required=True, metavar="FILE", help="the JSON file to write, or to add to")
    option("--run", type=Path, required=True, metavar="FOLDER", help="the run's folder; what is there is removed")
    option("--seconds", type=float, default=60.0, help="for the run, or for the whole search")
    parser.add_argument("--largest", action="store_true", help="search the largest batch")
    option("--first", type=parse_count, default=0, help="the batch to begin with, instead of the predicted")
    option("--grain", type=parse_count, default=4096, help="batches are multiples of it")
    option("--memory", type=parse_count, help="bytes that a run may take beyond the program itself, on a CPU")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="settings of clipscale train")
    given = parser.parse_args(argv)
    given.record.parent.mkdir(parents=True, exist_ok=True)
    words = sys.argv[1:] if argv is None else argv
    command = ["python", "-m", "clipscale.bench.fit", *words]
    if not given.largest:
        command = ["clipscale", "train", f"run={given.run}", *given.words]
    record: Row = {
        "benchmark": "largest" if given.largest else "runs",
        "settings": {"words": given.words} if given.largest else {},
        "machine": machine(shlex.join(command)),
        "how": HOW,
    }
    return (find_largest if given.largest else add_run)(record, given)


# ---- how the records are shown ----


RUN_COLUMNS = (
    Column("run", "run", words=True, case=True),
    Column("phase", "phase", words=True),
    Column("predicted MiB", "predicted_bytes", mebibytes),
    Column("measured MiB", "measured_bytes", mebibytes),
    Column("ratio", "ratio", "{:.3f}".format),
    Column("within 10 %", "ratio", lambda ratio: "yes" if abs(ratio - 1) <= TENTH else "no", words=True),
)
TRY_COLUMNS = (
    Column("samples", "batch", "{:,}".format, case=True),
    Column("what came of it", "status", words=True, case=True),
    Column("seconds", "seconds", "{:.0f}".format),
    Column("why", "reason", words=True),
)


def where(record: Row) -> str:
    return processor(record, "cuda" if record["machine"]["gpus"] else "cpu")


def phases(row: Row) -> list[Row]:
    """A line for each phase of a run; of one without figures, one with its status."""
    if row["status"] != "ok":
        return [{"run": row["run"], "status": row["status"]}]
    return [{"run": row["run"], "phase": name} | found for name, found in row["predicted"]["compared"].items()]


def run_notes(record: Row) -> list[str]:
    """What each run was, and how well it did where it was evaluated."""
    lines = []
    for row in record["rows"]:
        why = f": {row['status']}: {row['reason']}" if row["status"] != "ok" else ""
        lines.append(f"{row['run']}: {' '.join(row['settings'])}{why}")
    for row in record["rows"]:
        evaluated = row.get("evaluated") or {"results": {}}
        for name, metrics in evaluated["results"].items():
            shares = ", ".join(f"{key} {value:.1%}" for key, value in metrics.items() if isinstance(value, float))
            lines.append(f"{row['run']}: {name} at step {evaluated['step']:,}: {shares}")
    return [
        *lines,
        "Encode to optim: the peak of that part of the step beyond what was there before it. Peak: of the whole step. Host: "
        "resident memory of the process, which the target leaves out. How each is measured stands in the JSON.",
    ]


def within_a_tenth(rows: Sequence[Row]) -> list[str]:
    """Of each run the phase that is furthest off. The host's memory, which others share, is left out."""
    found: list[Found] = []
    for row in rows:
        compared = (lookup(row, "predicted.compared") or {}).items()
        errors = {name: abs(c["ratio"] - 1) for name, c in compared if name != "host" and c["ratio"] is not None}
        if row["status"] != "ok":
            found.append((row["run"], row["status"]))
        elif errors:
            worst = max(errors, key=lambda name: errors[name])
            found.append((f"{row['run']} ({worst})", errors[worst]))
        else:
            found.append((row["run"], "has no measured phases"))
    target = f"memory predicted within {TENTH:.0%} of measured in every phase"
    return [Target(target, lambda x: x <= TENTH, "{:.1%}").judge(found)]


def memory_bars(row: Row, title: str) -> Bars:
    """Predicted and measured bytes of every phase of a run."""
    compared = row["predicted"]["compared"]
    series = {
        side: [(found[f"{side}_bytes"] / MIB,) if found[f"{side}_bytes"] else None for found in compared.values()]
        for side in ("predicted", "measured")
    }
    texts = ["not measured" if found["ratio"] is None else f"{found['ratio']:.2f}" for found in compared.values()]
    return Bars(title, list(compared), series, texts, log=True)


def run_panels(record: Row) -> list[Curves | Bars]:
    """Bytes by phase of every run, and the ratios of all."""
    rows = [row for row in record["rows"] if row["status"] == "ok"]
    names = list(dict.fromkeys(name for row in rows for name in row["predicted"]["compared"]))
    ratios: dict[str, list[tuple[float, ...] | None]] = {}
    for row in rows:
        found = [lookup(row, f"predicted.compared.{name}.ratio") for name in names]
        ratios[row["run"]] = [None if ratio is None else (ratio,) for ratio in found]
    bars = [memory_bars(row, f"{row['run']}, MiB") for row in rows]
    return [*bars, Bars(f"predicted over measured (target: within {TENTH:.0%})", names, ratios, mark=1)]


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
    "runs": Benchmark(
        lambda record: f"memory of a step, predicted by clipscale plan and measured, on {where(record)}",
        lambda _: RUN_COLUMNS,
        run_notes,
        lambda record: within_a_tenth(record["rows"]),
        run_panels,
        across=3,
        lines=lambda record: [line for row in record["rows"] for line in phases(row)],
        groups=("run",),
    ),
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
