"""Records of benchmarks that are written as they go: what an interrupted run has measured already need not be measured again."""

import json
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FREE = ("seconds", "resume", "profile", "methods", "repeats", "memory", "n", "d", "dtype", "batch")
"""Settings that may differ from run to run of one record: each row says for itself what it measured."""


def write(path: Path, record: dict[str, Any]) -> None:
    """Put the record at `path`, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record | {"written": time.strftime("%Y-%m-%dT%H:%M:%S%z")}, indent=1) + "\n")
    part.rename(path)


def earlier(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """The record at `path` with its rows that have figures; nothing where settings, machine, versions or commit are not `record`'s."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    if _marks(found) != _marks(record):
        return {}
    return found | {"rows": [row for row in found["rows"] if row["status"] == "ok"]}


def _marks(record: dict[str, Any]) -> dict[str, Any]:
    facts = record["machine"]
    marks = {key: facts[key] for key in ("cpu", "gpus", "versions")}
    marks["commit"] = (facts["commit"] or "").rstrip("+")  # what is being written may itself be under version control
    return marks | {key: value for key, value in record["settings"].items() if key not in FREE}
