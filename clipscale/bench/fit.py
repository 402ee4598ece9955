"""Whole training runs in fresh processes, beside what `clipscale plan` predicts for them.

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
from pathlib import Path
from typing import Any

from clipscale.bench import harness
from clipscale.bench.harness import Task
from clipscale.bench.memory import end_first, is_out_of_memory
from clipscale.bench.present import MIB, Bars, Benchmark, Column, Value, finish, lookup, mebibytes
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
"""Relative error that predicted memory may have."""
REFUSALS = ("are free for each of", "of a batch are larger than", "was killed by SIGKILL", "samples fit the device")
"""Parts of the program's own messages for lack of memory (data/loader, autotune)."""
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
    from clipscale.cli import main as cli

    end_first()
    try:
        code = cli.dispatch(list(task.job))
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


def parser(text: str | None) -> argparse.ArgumentParser:
    """The options of both programs."""
    found = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--record", type=Path, required=True, help="the JSON file to write, or to add to")
    found.add_argument("--run", type=Path, required=True, help="the run's folder; what is there is removed")
    found.add_argument("--seconds", type=float, default=60.0, help="for all")
    found.add_argument("words", nargs="*", metavar="KEY=VALUE", help="settings of clipscale train")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and add the row. Returns 1 if the run did not end well; the record has the reason."""
    given = parser(__doc__).parse_args(argv)
    record = begun(given.record, ["clipscale", "train", f"run={given.run}", *given.words])
    same = [row for row in record["rows"] if row["run"] == given.run.name]
    if any(final(row) and row["settings"] == given.words for row in same):
        print(f"{given.run.name}: recorded already")
        return 0
    row = trained(given.run, given.words, given.seconds)
    record["rows"] = [*(other for other in record["rows"] if other not in same), row]
    finish(record, given.record)
    return 0 if row["status"] == "ok" else 1


def begun(path: Path, command: Sequence[str], **settings: Any) -> Row:
    """The record at `path`, resumed if it goes with this command's machine, code and settings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"benchmark": "runs", "settings": settings, "machine": machine(shlex.join(command)), "how": HOW}
    return record | {"rows": earlier(path, record).get("rows", [])}


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
    sys.exit(main())
