"""Whole training runs in fresh processes, beside what `clipscale plan` predicts for them.

    python -m clipscale.bench.fit --record FILE --run runs/NAME --seconds 60 KEY=VALUE ...

adds a run to FILE (JSON): the command of `clipscale train`, the last steps, the evaluation, and predicted beside measured memory. A run
that FILE holds already, of the same command, code, machine and versions, is not run again.

    python -m clipscale.bench.fit --search 4k ...

searches for the largest batch, in multiples of 4k, from the one that `clipscale plan` predicts. Each try is a run of one step.
"""

import argparse
import json
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from clipscale.bench import harness
from clipscale.bench.harness import Task
from clipscale.bench.memory import end_first, is_out_of_memory, next_batch
from clipscale.bench.present import MIB, Bars, Benchmark, Column, Found, Target, Value, finish, lookup, mebibytes
from clipscale.bench.record import device_of, earlier, final, machine, processor, write
from clipscale.cli.main import composed, dispatch
from clipscale.config.tools import PlanConfig
from clipscale.data.loader.memory import free_memory
from clipscale.errors import UserError
from clipscale.hardware import hardware_of
from clipscale.plan.compare import compare
from clipscale.plan.planner import planned
from clipscale.units import parse_count

Row = dict[str, Any]

STEPS = 3
"""Steps at the end of a run that are kept."""
GRACE = 20.0
"""Seconds that an interrupted run has to end."""
TENTH = 0.1
"""Relative error that predicted memory may have."""
REFUSALS = ("are free for each of", "of a batch are larger than", "was killed by SIGKILL", "samples fit the device")
"""Parts of the program's own messages for lack of memory (data/loader, autotune)."""
TOO_LARGE = ("refused", "out of memory")
FACTOR, CLOSE = 1.25, 0.03
"""By the first the batch grows while nothing has been refused, and shrinks while nothing has fitted. The search ends when the smallest
that does not fit is this close to the largest that does, as a share of the former."""
HOW = {
    "predicted": "clipscale plan run=RUN: a dry run of the step without memory, for the settings and the machine of the run",
    "measured": "medians over the steps from the second on: growth of the CUDA allocator's peak by phase; host: resident memory",
    "ratio": "predicted over measured; of a run on a CPU only the host's memory is measured",
}


def trained(run: Path, words: Sequence[str], seconds: float) -> Row:
    """A row: `clipscale train run=RUN WORDS...` in a fresh process, from the start, for `seconds` at most, beside its prediction.

    Its status is `ok`; `refused`, if the program found that memory does not suffice; `out of memory`; `no time`; else `failed`.
    """
    shutil.rmtree(run, ignore_errors=True)
    start = time.monotonic()
    command = ["train", f"run={run}", *words]
    (ended,) = harness.run("clipscale.bench.fit:work", command, seconds=max(1.0, seconds), grace=GRACE)
    if ended.status is None:
        status, reason = "no time", f"not done within {seconds:.0f} s"
    elif ended.answer:
        status, reason = ended.answer["status"], ended.answer["reason"]
    else:
        status, reason = ended.cause
    row: Row = {"run": run.name, "settings": list(words), "status": status, "reason": reason}
    row |= {"seconds": time.monotonic() - start, "command": shlex.join(["clipscale", *command])}
    return row | (measured(run) if status == "ok" else {})


def measured(run: Path) -> Row:
    """The last steps of a run that ended well, its newest evaluation, and its memory beside the prediction."""
    steps = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = max((run / "eval").glob("step_*.json"), default=None)
    return {
        "steps": steps[-STEPS:],
        "evaluated": None if evaluated is None else json.loads(evaluated.read_text()),
        "predicted": compare(PlanConfig(run=str(run))),
    }


def work(task: Task) -> None:
    """The run, in its process; leaves its status and the reason."""
    end_first()
    try:
        code = dispatch(list(task.job))
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


def search(rows: list[Row], first: int, grain: int, seconds: float, attempt: Callable[[int, float], Row]) -> str:
    """Add tries to `rows` until the largest batch is known closely; return what ended the search.

    Batches are multiples of `grain`. `attempt(batch, seconds)` tries one, for so long at most.
    """
    end = time.monotonic() + seconds
    while True:
        good = max((row["batch"] for row in rows if row["status"] == "ok"), default=0)
        bad = min((row["batch"] for row in rows if row["status"] in TOO_LARGE), default=0)
        size = next_batch(good, bad, first, grain=grain, factor=FACTOR, close=CLOSE)
        if size is None:
            return "found" if good else f"not even {grain} samples fit"
        row = attempt(size, end - time.monotonic()) | {"batch": size}
        rows.append(row)
        if row["status"] not in ("ok", *TOO_LARGE):
            return f"{row['status']}: {row['reason']}"


def predicted(words: Sequence[str], grain: int) -> Row:
    """The largest power of two that `clipscale plan` says fits this device and host, and what bounds it. Raises UserError."""
    device, free = device_of("cpu" if "device=cpu" in words else "auto"), free_memory()
    hardware = hardware_of(torch.cuda.get_device_name(0)) or "" if device == "cuda" else "cpu"
    one = [f"batch={grain}", f"samples={grain}", f"hardware={hardware}", f"host_memory={free}"]
    config = composed("plan", [*words, *one])
    assert isinstance(config, PlanConfig)
    with planned(config) as plan:
        batch, bound = plan.largest_batch()
    return {"batch": batch, "bound": bound, "host_free_bytes": free}


def largest(record: Row, given: argparse.Namespace) -> Row:
    """Search for the largest batch; the record keeps every try."""
    begun, found = time.monotonic(), predicted(given.words, given.search)
    rows = [row for row in record["rows"] if row["status"] in ("ok", *TOO_LARGE)]

    def attempt(batch: int, seconds: float) -> Row:
        words = [*given.words, f"batch={batch}", f"samples={batch}", "launch.procs=1", "log.progress=false"]
        row = trained(given.run.with_name(f"{given.run.name}-{batch}"), words, seconds)
        print(f"{batch} samples: {row['status']} {row['reason']} ({row['seconds']:.0f} s)", flush=True)
        write(given.record, record | {"rows": [*rows, row | {"batch": batch}]})
        return row

    left = given.seconds - (time.monotonic() - begun)
    ended = search(rows, given.first or found["batch"], given.search, left, attempt)
    best = max((row["batch"] for row in rows if row["status"] == "ok"), default=None)
    notes = [f"predicted by clipscale plan: {found['batch']:,} samples, bound by {found['bound'] or 'nothing'}"]
    notes += [f"largest that ran a whole step: {best or 'none'} (ended: {ended})"]
    return record | {"rows": rows, "predicted": found, "largest": best, "ended": ended, "notes": notes}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and add the row; or search. Returns 1 if no run ended well; the record has the reason. Raises UserError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="the JSON file to write, or to add to")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder; what is there is removed")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all")
    parser.add_argument(
        "--search", type=parse_count, default=0, help="search for the largest batch, in multiples of this"
    )
    parser.add_argument("--first", type=parse_count, default=0, help="the batch to begin with, not the predicted one")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="settings of clipscale train")
    given = parser.parse_args(argv)
    given.record.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["clipscale", "train", f"run={given.run}", *given.words])
    settings = {"search": given.search, "words": given.words} if given.search else {}
    record: Row = {"benchmark": "runs", "settings": settings, "machine": machine(command), "how": HOW}
    record |= {"rows": earlier(given.record, record).get("rows", [])}
    if given.search:
        record = largest(record, given)
        finish(record, given.record)
        return 0 if record["largest"] else 1
    same = [row for row in record["rows"] if row["run"] == given.run.name]
    if any(final(row) and row["settings"] == given.words for row in same):
        print(f"{given.run.name}: recorded already")
        return 0
    row = trained(given.run, given.words, given.seconds)
    record["rows"] = [*(other for other in record["rows"] if other not in same), row]
    finish(record, given.record)
    return 0 if row["status"] == "ok" else 1


# ---- how the record is shown ----

COLUMNS = (
    Column("run", "run", words=True, case=True),
    Column("phase", "phase", words=True),
    Column("predicted MiB", "predicted_bytes", mebibytes),
    Column("measured MiB", "measured_bytes", mebibytes),
    Column("ratio", "ratio", "{:.3f}".format),
)


def phases(row: Row) -> list[Row]:
    """A line for each phase of a run; of one without figures, one with its status."""
    if row["status"] != "ok":
        return [row]
    return [{"run": row["run"], "phase": name} | found for name, found in row["predicted"]["compared"].items()]


def notes(record: Row) -> list[str]:
    """The settings of each run, and how well it did if it was evaluated."""
    lines = [*record.get("notes", []), *(f"{row['run']}: {' '.join(row['settings'])}" for row in record["rows"])]
    for row in record["rows"]:
        evaluated = row.get("evaluated") or {"results": {}}
        for name, metrics in evaluated["results"].items():
            shares = ", ".join(f"{key} {value:.1%}" for key, value in metrics.items() if isinstance(value, float))
            lines.append(f"{row['run']}: {name} at step {evaluated['step']:,}: {shares}")
    return lines


def within_a_tenth(record: Row) -> list[str]:
    """Of each run the phase with the largest error, without the host's memory, which others share.

    Tries of a search for the largest batch (`batch`) that did not fit are left out.
    """
    found: list[Found] = []
    for row in (row for row in record["rows"] if row["status"] == "ok" or "batch" not in row):
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


def panels(record: Row) -> list[Bars]:
    """Predicted and measured memory of every phase, run by run."""
    found = []
    for row in (row for row in record["rows"] if row["status"] == "ok"):
        compared = row["predicted"]["compared"]
        series: dict[str, list[Value]] = {}
        for side in ("predicted", "measured"):
            sizes = [phase[f"{side}_bytes"] for phase in compared.values()]
            series[side] = [None if size is None else size / MIB for size in sizes]
        found.append(Bars(f"{row['run']}, MiB", list(compared), series))
    return found


def title(record: Row) -> str:
    where = processor(record, "cuda" if record["machine"]["gpus"] else "cpu")
    return f"memory of a step, predicted by clipscale plan and measured, on {where}"


def lines(record: Row) -> list[Row]:
    return [line for row in record["rows"] for line in phases(row)]


BENCHMARKS = {"runs": Benchmark(("run",), title, COLUMNS, within_a_tenth, panels, notes, lines)}

if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
