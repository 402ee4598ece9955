"""Reads a run's records: metrics and evaluations. Raises UserError for a damaged file."""

import json
from pathlib import Path

from clipscale.common import files
from clipscale.common.record import Record


def read_metrics(path: Path) -> list[Record]:
    """The records of a `metrics.jsonl`, in order, without an incomplete last line."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    with files.reported("metrics", path, "restore the file, or move it away"):
        return [json.loads(line) for line in lines if line.endswith(b"\n")]


def read_evaluations(run_dir: Path) -> list[Record]:
    """The contents of `eval/step_N.json`, by step: `step`, `results` (set -> metric -> value), `measured`."""
    records = []
    for file in (run_dir / "eval").glob("step_*.json"):
        with files.reported("results", file, "evaluate again"):
            records.append(files.read_json(file) | {"step": int(file.stem.removeprefix("step_"))})
    return sorted(records, key=lambda record: int(record["step"]))
