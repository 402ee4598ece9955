"""Reads a run's evaluation results and retrieved examples. Both raise UserError for a damaged file."""

import json
from pathlib import Path
from typing import Any

from PIL import Image

from clipscale.common import files

Record = dict[str, Any]


def read_evaluations(run_dir: Path) -> list[Record]:
    """The contents of `eval/step_N.json`, by step: `step`, `results` (set -> metric -> value), `measured`."""
    records = []
    for file in (run_dir / "eval").glob("step_*.json"):
        with files.reported("results", file, "evaluate again"):
            records.append(json.loads(file.read_text()) | {"step": int(file.stem.removeprefix("step_"))})
    return sorted(records, key=lambda record: int(record["step"]))


def read_galleries(run_dir: Path) -> list[tuple[Record, Image.Image]]:
    """The retrieved examples of each set: description and picture, as clipscale.eval.examples writes them."""
    galleries = []
    for file in sorted((run_dir / "eval" / "retrieved").glob("*.json")):
        with files.reported("retrieved examples", file, "evaluate again"):
            picture = Image.open(file.with_suffix(".png"), formats=["PNG"]).convert("RGB")
            galleries.append((json.loads(file.read_text()), picture))
    return galleries
