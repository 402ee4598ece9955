"""Reads a run's records: metrics and evaluations. Raises UserError for a damaged file."""

import json
import operator
from contextlib import suppress
from pathlib import Path

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.record import Record


def read_metrics(path: Path) -> list[Record]:
    """The records of a `metrics.jsonl`, in order, without an incomplete last line."""
    records, damaged = whole_lines(path)
    if damaged:
        raise UserError(f"metrics: {path} has {damaged} damaged lines; restore the file, or start the run again")
    return records


def whole_lines(path: Path) -> tuple[list[Record], int]:
    """The records of a `metrics.jsonl`, and the number of its lines that are no records."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    records = []
    for line in lines:
        with suppress(*files.DAMAGED):
            record = json.loads(line)
            records.append(record | {"step": operator.index(record["step"])})
    return records, len(lines) - len(records)


def rate_of_step(run_dir: Path, step: int) -> float | None:
    """The learning rate of a step, by the run's records; None: they do not say."""
    records, _ = whole_lines(run_dir / "metrics.jsonl")
    rates = [record["lr"] for record in records if record["step"] == step and isinstance(record.get("lr"), float)]
    return rates[0] if rates else None


def read_evaluations(run_dir: Path) -> list[Record]:
    """The contents of `eval/step_N.json`, by step: `step`, `results` (set -> metric -> value), `measured`."""
    records = []
    for file in (run_dir / "eval").glob("step_*.json"):
        with files.reported("results", file, "evaluate again"):
            files.check_inside(file, run_dir)
            records.append(files.read_record(file) | {"step": int(file.stem.removeprefix("step_"))})
    return sorted(records, key=lambda record: int(record["step"]))
