"""Records of benchmarks: what was measured, on what, by which command and code. They are written measurement by measurement and resumed.

`python -m clipscale.bench.record COMMAND` prints the machine, as the first line of a file that keeps what COMMAND prints.
"""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, Self

import psutil
import torch
from rich.console import Console

from clipscale.bench.harness import Answer, Job, measure
from clipscale.bench.present import Key, benchmark_of, show
from clipscale.common.errors import UserError
from clipscale.common.files import read_json, write_json
from clipscale.common.units import parse_count, split
from clipscale.report.environment import environment
from clipscale.report.table import plain_console

Row = dict[str, Any]

FREE = ("resume", "methods", "repeats", "memory", "n", "d", "dtype", "sizes", "stream")
"""Settings that may differ from run to run of one record: each row has its own. Of the steps, `batch` too."""
FINAL = ("ok", "out of memory", "not supported")
"""Statuses of rows that are not tried again."""


class Part(Protocol):
    """Rows of a benchmark that are measured together."""

    @property
    def label(self) -> str: ...

    def names(self) -> list[Key]:
        """Of its rows, in the order of the table."""

    def without(self, done: set[Key]) -> Self:
        """The part without rows that an earlier run measured."""

    def jobs(self, answers: Sequence[Sequence[Answer]]) -> Iterator[Job]:
        """What is to be measured. `answers` grows by one for each job that is done."""

    def found(self, answers: Sequence[Sequence[Answer]]) -> Row:
        """`rows`, and further entries of the record. Lists and tables grow part by part."""


def drive(verb: str, worker: str, parts: Sequence[Part], settings: Any, name: str, console: Console | None = None,
          **more: Any) -> list[Row]:  # fmt: skip
    """Measure, print, and save as NAME.json in the folder `settings.out`. Returns all rows.

    With `resume`, rows, methods and GEMM rates of an earlier record there are kept, if the two go together. The record is written after
    every measurement, so that an interruption leaves what came before.
    """
    path, console = Path(settings.out).expanduser() / f"{name}.json", console or plain_console()
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in asdict(settings).items() if key != "out"}
    given = [f"{f.name}={values[f.name]}" for f in fields(settings) if values.get(f.name, f.default) != f.default]
    facts = machine(shlex.join(["clipscale", "bench", verb, *given]))
    record: Row = {"benchmark": verb, "settings": values, "machine": facts, "rows": []} | more
    before = earlier(path, record) if settings.resume else {}
    record |= {key: before[key] for key in ("rows", "gemm") if key in before}
    if "methods" in record:
        record["methods"] = before.get("methods", {}) | record["methods"]
    record["load_average_before"] = os.getloadavg()[0]  # processes that wanted a core, over the last minute
    key = benchmark_of(record).key
    done = {key(row) for row in record["rows"] if final(row)}
    places = {name: place for place, name in enumerate(name for part in parts for name in part.names())}
    try:
        with console.status(verb) as status:
            for part in (part.without(done) for part in parts):
                if part.names():
                    status.update(part.label)
                    measure_part(worker, part, record, path)
                    record["rows"].sort(key=lambda row: places.get(key(row), -1))  # rows of earlier runs come first
    finally:
        record["load_average_after"] = os.getloadavg()[0]
        record["targets"] = benchmark_of(record).targets(record)
        write(path, record)
        show(record, path, console)
    return list(record["rows"])


def measure_part(worker: str, part: Part, record: Row, path: Path) -> None:
    """Do the jobs of a part; the record grows by what they find."""
    key = benchmark_of(record).key
    before = record | {"rows": [row for row in record["rows"] if key(row) not in part.names()]}
    answers: list[list[Answer]] = []

    def on_answer(now: list[Answer]) -> None:
        for name, value in part.found([*answers, now]).items():
            if isinstance(value, list | dict):
                value = [*before[name], *value] if isinstance(value, list) else before[name] | value
            record[name] = value
        write(path, record)

    on_answer([])
    for job in part.jobs(answers):
        answers.append(measure(worker, job, on_answer))
        on_answer([])


def write(path: Path, record: Row) -> None:
    """Put the record at `path`, whole or not at all. Each row gets the command, the commit and the code that measured it."""
    facts = record["machine"]
    marks = {"command": facts["command"], "commit": facts["commit"], "code": facts["code"]["clipscale"]}
    for row in [*record["rows"], *record.get("gemm", [])]:
        row |= {key: value for key, value in marks.items() if key not in row}
    write_json(path, record | {"written": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


def earlier(path: Path, record: Row) -> Row:
    """The record at `path`, to resume; nothing if its settings, machine, versions or code are not those of `record`.

    Such a record is kept beside it with its table and picture: loss-cuda.json as loss-cuda-WHEN.json, by the time it was written.
    """
    if not path.exists():
        return {}
    try:
        found: Row = read_json(path)
        if _marks(found) == _marks(record) and isinstance(found["rows"], list):
            return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # a damaged record is kept like any other that does not fit
    when = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y%m%dT%H%M%S%f")
    for file in map(path.with_suffix, (path.suffix, ".md", ".png")):
        if file.exists():
            file.rename(file.with_stem(f"{path.stem}-{when}"))
    return {}


def final(row: Row) -> bool:
    """Is there nothing to be gained from measuring the row again."""
    return row.get("status", "ok") in FINAL


def _marks(record: Row) -> Row:
    facts = record["machine"]
    marks = {key: facts.get(key) for key in ("cpu", "gpus", "driver", "versions", "code")}
    free = (*FREE, "batch") if record["benchmark"] == "step" else FREE
    return marks | {key: value for key, value in record["settings"].items() if key not in free}


# ---- the machine ----


def machine(command: str) -> Row:
    """What this process runs on, less names and paths of the host."""
    found = environment()
    del found["hostname"]
    return found | {
        "command": command,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "memory_bytes": psutil.virtual_memory().total,
        "driver": _driver(),
    }


def processor(record: Row, device: str = "cpu", threads: int | None = None) -> str:
    """What a record was measured on: the GPU's name, or the CPU's with its threads, or cores."""
    facts = record["machine"]
    if device == "cuda":
        return str(facts["gpus"][0])
    return f"{facts['cpu']}, {facts['cpus']} cores" if threads is None else f"{facts['cpu']}, {threads} threads"


def _driver() -> str | None:
    """Version of the GPU's driver; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.splitlines()
    return lines[0].strip() if lines else None


def _cpu_name() -> str:
    source = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", source.read_text(), re.MULTILINE) if source.exists() else []
    return names[0].strip() if names else platform.processor() or platform.machine()


# ---- settings that benchmarks share ----


def counts(name: str, text: str) -> list[int]:
    """`1k,2k` as integers. Raises UserError for what is no count, and for 0."""
    try:
        found = [parse_count(word) for word in split(text)]
    except ValueError as error:
        raise UserError(f"{name}={text}: {error}") from error
    if 0 in found:
        raise UserError(f"{name}={text}: must be at least 1")
    return found


def device_of(setting: str) -> str:
    """`cuda` or `cpu`, by device=`auto` (CUDA where there is one), `cuda` or `cpu`. Raises UserError."""
    if setting == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: torch finds no CUDA device; use device=cpu")
    return "cuda" if setting != "cpu" and torch.cuda.is_available() else "cpu"


def main(command: Sequence[str]) -> None:
    print(json.dumps(machine(" ".join(command))))


if __name__ == "__main__":
    main(sys.argv[1:])
