"""Reads a run's evaluation results. A damaged file is left out with a warning: the others can still be shown."""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from clipscale import files

log = logging.getLogger(__name__)

Record = dict[str, Any]


def read_evaluation(file: Path) -> Record:
    """A result file: `step`, `results` (set -> metric -> value), `measured`. Raises OSError, and ValueError for another content."""
    record = files.read_json(file)
    results = record.get("results") if isinstance(record, dict) else None
    if not isinstance(results, dict) or not all(isinstance(metrics, dict) for metrics in results.values()):
        raise ValueError("it holds no results")
    numbers = [value for metrics in results.values() for value in metrics.values()]
    if not all(isinstance(value, int | float) for value in numbers):
        raise ValueError("a result is no number")
    return record


def read_evaluations(run_dir: Path) -> list[Record]:
    """The contents of `eval/step_N.json`, by step."""
    found = []
    for file in (run_dir / "eval").glob("step_*.json"):
        if re.fullmatch(r"step_\d+\.json", file.name):
            try:
                found.append(read_evaluation(file) | {"step": int(file.stem.removeprefix("step_"))})
            except (OSError, ValueError) as error:
                _left_out(file, error)
    return sorted(found, key=lambda record: record["step"])


def read_galleries(run_dir: Path, most: int) -> list[tuple[Record, np.ndarray]]:
    """The retrieved examples of at most `most` sets: description and picture."""
    found: list[tuple[Record, np.ndarray]] = []
    for file in sorted((run_dir / "eval" / "retrieved").glob("*.json")):
        try:
            record = files.read_json(file)
            if not isinstance(record, dict) or not {"set", "step", "tile", "columns", "rows"} <= set(record):
                raise ValueError("it describes no picture")
            with files.opened(file.with_suffix(".png")) as picture:
                found.append((record, np.asarray(Image.open(picture, formats=["PNG"]).convert("RGB"))))
        except (OSError, ValueError, SyntaxError) as error:  # Pillow raises all three for damaged pictures
            _left_out(file, error)
        if len(found) == most:
            break
    return found


def _left_out(file: Path, error: Exception) -> None:
    log.warning("%s is left out: it cannot be read (%s); evaluate again", file, error)
