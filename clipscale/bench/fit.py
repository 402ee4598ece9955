"""Does a run fit as `clipscale plan` predicts: a whole training run in a process of its own, beside its prediction.

    python -m clipscale.bench.fit --record FILE --run runs/NAME --seconds 60 KEY=VALUE ...

adds a run to FILE (JSON): the command of `clipscale train`, the last steps, the evaluation, and predicted beside measured memory. A run
that FILE holds already, of the same command, code, machine and versions, is not run again.
"""

import argparse
import json
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from clipscale.bench import harness
from clipscale.bench.harness import Task
from clipscale.bench.memory import bound_address_space, end_first, is_out_of_memory
from clipscale.bench.present import MIB, Bars, Benchmark, Column, Curves, finish, lookup, mebibytes
from clipscale.bench.record import earlier, final, machine, processor
from clipscale.bench.targets import Found, Target
from clipscale.config.tools import PlanConfig
from clipscale.errors import UserError
from clipscale.plan.compare import compare

Row = dict[str, Any]

STEPS = 3
"""Steps at the end of a run that are kept."""
GRACE = 20.0
"""Seconds that an interrupted run has to end."""
TENTH = 0.1
"""What predicted memory may be off by, in parts of the measured."""
REFUSALS = ("are free for each of", "of a batch are larger than", "was killed by SIGKILL", "samples fit the device")
"""What the program's own refusals for lack of memory contain (data/loader, autotune)."""
FITS = "ok"
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


def parser(text: str | None) -> argparse.ArgumentParser:
    """The options of both programs."""
    found = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--record", type=Path, required=True, help="the JSON file to write, or to add to")
    found.add_argument("--run", type=Path, required=True, help="the run's folder; what is there is removed")
    found.add_argument("--seconds", type=float, default=60.0, help="for all")
    found.add_argument("words", nargs="*", metavar="KEY=VALUE", help="settings of clipscale train")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and add the row. Returns 1 where the run did not end well; the record has the reason."""
    given = parser(__doc__).parse_args(argv)
    given.record.parent.mkdir(parents=True, exist_ok=True)
    facts = machine(shlex.join(["clipscale", "train", f"run={given.run}", *given.words]))
    record: Row = {"benchmark": "runs", "settings": {}, "machine": facts, "how": HOW}
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
    return 0 if found.status == FITS else 1


# ---- how the records are shown ----


RUN_COLUMNS = (
    Column("run", "run", words=True, case=True),
    Column("phase", "phase", words=True),
    Column("predicted MiB", "predicted_bytes", mebibytes),
    Column("measured MiB", "measured_bytes", mebibytes),
    Column("ratio", "ratio", "{:.3f}".format),
    Column("within 10 %", "ratio", lambda ratio: "yes" if abs(ratio - 1) <= TENTH else "no", words=True),
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
}

if __name__ == "__main__":
    sys.exit(main())
