"""Drives every benchmark: for each part, for each of its jobs, measure in fresh processes, make rows, write the record.

The time budget (`seconds=`), `resume=true` and records that survive an interruption are handled here.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

from rich.console import Console

from clipscale.bench.harness import Answer, Job, measure
from clipscale.bench.present import Key, benchmark_of, finish
from clipscale.bench.record import final, write
from clipscale.report.table import plain_console

Row = dict[str, Any]


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
        """`rows`, and further entries of the record."""


def drive(target: str, parts: Sequence[Part], record: Row, path: Path, seconds: float = 0.0,
          console: Console | None = None) -> list[Row]:  # fmt: skip
    """Measure what the record lacks, part by part, within `seconds` (0: no bound); print and save. Returns all rows."""
    console, key = console or plain_console(), benchmark_of(record).key
    end = time.monotonic() + (seconds or math.inf)
    places = {name: place for place, name in enumerate(name for part in parts for name in part.names())}
    done = {key(row) for row in record["rows"] if final(row)}
    record["load_average_before"] = _load()
    with console.status(record["benchmark"]) as status:
        for part in (part.without(done) for part in parts):
            if part.names():
                status.update(part.label)
                measure_part(target, part, record, path, end)
                record["rows"].sort(key=lambda row: places.get(key(row), -1))  # rows of earlier runs come first
    record["load_average_after"] = _load()
    return finish(record, path, console)


def measure_part(target: str, part: Part, record: Row, path: Path, end: float) -> None:
    """Do the jobs of a part. The record is written after every measurement, so that an interruption leaves what came before."""
    key = benchmark_of(record).key
    before = dict(record)
    before["rows"] = [row for row in record["rows"] if key(row) not in part.names()]
    answers: list[list[Answer]] = []

    def on_answer(now: list[Answer]) -> None:
        for name, value in part.found([*answers, now]).items():
            if isinstance(value, list):
                value = [*before[name], *value]
            elif isinstance(value, dict):
                value = before[name] | value
            record[name] = value
        write(path, record)

    on_answer([])
    for job in part.jobs(answers):
        seconds = None if math.isinf(end) else max(0.0, end - time.monotonic())
        now = measure(target, replace(job, seconds=seconds), on_answer)
        on_answer(now)
        answers.append(now)


def _load() -> float:
    """Processes that wanted a core, over the last minute."""
    return round(os.getloadavg()[0], 2)
