"""Records of benchmarks that are written as they go: what an interrupted run has measured already need not be measured again."""

import json
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FREE = ("seconds", "resume", "profile", "methods", "repeats", "memory", "n", "d", "dtype", "sizes", "stream")
"""Settings that may differ from run to run of one record: each row says for itself what it measured."""
OF_ROWS = {"step": ("batch",)}
"""More of them, by benchmark."""
SETTLED = ("ok", "out of memory", "not supported")
"""What a row may say that is not to be tried again."""


def write(path: Path, record: dict[str, Any]) -> None:
    """Put the record at `path`, whole or not at all. Rows are given the command, the commit and the code that measured them."""
    facts = record["machine"]
    for row in [*record["rows"], *record.get("gemm", []), *([record["fits"]] if "fits" in record else [])]:
        row.setdefault("command", facts["command"])
        row.setdefault("commit", facts["commit"])
        row.setdefault("code", facts["code"]["clipscale"])
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record | {"written": time.strftime("%Y-%m-%dT%H:%M:%S%z")}, indent=1) + "\n")
    part.rename(path)


def earlier(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """The record at `path`, to go on with; nothing where settings, machine, versions or code are not `record`'s.

    Such a record is kept beside it with its table and picture: loss-cuda.json as loss-cuda-WHEN.json, by the time it was written.
    """
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    if _marks(found) != _marks(record):
        when = "".join(c for c in found.get("written", "before")[:19] if c.isalnum())
        names = (f"{path.stem}-{when}{again}{path.suffix}" for again in ("", *(f"-{n}" for n in range(2, 100))))
        aside = next(there for name in names if not (there := path.with_name(name)).exists())
        for suffix in (path.suffix, ".md", ".png"):
            if path.with_suffix(suffix).exists():
                path.with_suffix(suffix).rename(aside.with_suffix(suffix))
        return {}
    return found


def settled(row: Row) -> bool:
    """Is there nothing to be gained from measuring it again."""
    return row["status"] in SETTLED


def _marks(record: dict[str, Any]) -> dict[str, Any]:
    facts = record["machine"]
    marks = {key: facts.get(key) for key in ("cpu", "gpus", "driver", "versions", "code")}
    free = (*FREE, *OF_ROWS.get(record["benchmark"], ()))
    return marks | {key: value for key, value in record["settings"].items() if key not in free}
