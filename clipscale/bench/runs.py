"""Whole training runs as measurements: each in a process of its own, with what it ran on, and beside what `clipscale plan` says of it.

    python -m clipscale.bench.runs --record FILE --run runs/NAME --seconds 60 KEY=VALUE ...

puts a row into FILE (JSON): the command of `clipscale train`, the commit, the last steps, what was evaluated, prediction and measurement;
and the table (.md) and the picture (.png) of all rows beside it. A run that FILE holds already, of the same command, code, machine and
versions, is not run again.
"""

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from clipscale.bench import processes
from clipscale.bench.machine import facts
from clipscale.bench.records import earlier, settled, write
from clipscale.bench.runs_draw import draw
from clipscale.bench.runs_table import legend, table
from clipscale.bench.sheet import publish
from clipscale.bench.verdicts import of_plan
from clipscale.report.table import plain_console

Row = dict[str, Any]

STEPS = 3
"""Steps at the end of a run that are kept."""
GRACE = 20.0
"""Seconds that a run that is told to end has for it."""
HOW = {
    "predicted": "clipscale plan run=RUN: a dry run of the step, without memory, for the settings and the machine of the run",
    "measured": "medians over the steps from the second on; encode, loss, replay, optim: peak of torch's CUDA allocator in that part of "
    "the step beyond what was there when it began; peak: of the whole step; host: resident memory of rank 0",
    "ratio": "predicted over measured; a CPU has no allocator to ask, so of a run on one the host's alone is measured",
}


@dataclass(frozen=True)
class Attempt:
    """How a run ended."""

    status: str
    """`ok`; `refused`: the program said that memory does not suffice; `out of memory`; `no time`; `failed`: anything else."""
    reason: str
    seconds: float

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
    (ended,) = processes.run("clipscale.bench.runs_work", job, seconds=max(1.0, seconds), grace=GRACE)
    if ended.status is None:
        status, reason = "no time", f"not done within {seconds:.0f} s"
    elif ended.answer:
        status, reason = ended.answer["status"], ended.answer["reason"]
    else:
        status, reason = ended.cause
    return Attempt(status, reason, time.monotonic() - start)


def row_of(run: Path, words: Sequence[str]) -> Row:
    """What a run that has ended well leaves in a record: its last steps, its newest evaluation, and prediction beside measurement."""
    from clipscale.config.tools import PlanConfig
    from clipscale.plan.compare import compare

    steps = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = max((run / "eval").glob("step_*.json"), default=None)
    return {
        "run": run.name,
        "settings": list(words),
        "steps": steps[-STEPS:],
        "evaluated": None if evaluated is None else json.loads(evaluated.read_text()),
        "predicted": compare(PlanConfig(run=str(run))),
    }


def present(record: Row, path: Path, console: Console) -> None:
    """Table and picture of the record at `path`, printed and beside it."""
    publish(table(record), [*legend(record), *record["verdicts"]], path, partial(draw, record), console)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 where the run did not end well; the record says why."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="the JSON file to write, or to add to")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder; what is there is removed")
    parser.add_argument("--seconds", type=float, default=60.0, help="the run may take")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="settings of clipscale train")
    given = parser.parse_args(argv)
    record: Row = {
        "benchmark": "runs",
        "settings": {},
        "machine": facts(shlex.join(["clipscale", "train", f"run={given.run}", *given.words])),
        "how": HOW,
    }
    given.record.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = earlier(given.record, record).get("rows", [])
    same = [row for row in rows if row["run"] == given.run.name]
    if any(settled(row) and row["settings"] == given.words for row in same):
        print(f"{given.run.name}: recorded already")
        return 0
    found = attempt(given.run, given.words, given.seconds)
    row = row_of(given.run, given.words) if found.status == "ok" else {"run": given.run.name, "settings": given.words}
    row |= {"status": found.status, "reason": found.reason, "seconds": found.seconds}
    record["rows"] = [*(other for other in rows if other not in same), row]
    record["verdicts"] = of_plan(record["rows"])
    write(given.record, record)
    present(record, given.record, plain_console())
    return 0 if found.status == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
