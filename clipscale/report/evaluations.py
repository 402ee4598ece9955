"""Reads a run's evaluation results. A damaged file is left out with a warning: the others can still be shown."""

import logging
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from clipscale.common import files

log = logging.getLogger(__name__)

Record = dict[str, Any]
LARGEST = 1e30
"""No result comes near it. Larger ones cannot be drawn."""


MOST_PIXELS = 1 << 24
"""Pixels of a picture of retrieved images. Ours have 600,000; matplotlib takes some hundred bytes for each."""


class _Row(TypedDict):
    """A caption, and the column of its image, if it was found."""

    caption: str
    hit: Annotated[int, Field(ge=0, lt=64)] | None


class _Gallery(TypedDict):
    """What is in the picture beside it: a row of `columns` images for each caption, and one more."""

    set: str
    step: Annotated[int, Field(ge=0, lt=2**53)] | None
    tile: Annotated[int, Field(ge=1, le=1024)]
    columns: Annotated[int, Field(ge=1, lt=64)]
    rows: Annotated[list[_Row], Field(min_length=1, max_length=64)]


_GALLERY = TypeAdapter(_Gallery)


def read_evaluation(file: Path) -> Record:
    """A result file: `step`, `results` (set -> metric -> value), `measured`. Raises OSError, and ValueError for another content."""
    record = files.read_json(file)
    results = record.get("results") if isinstance(record, dict) else None
    if not isinstance(results, dict) or not all(isinstance(metrics, dict) for metrics in results.values()):
        raise ValueError("it holds no results")
    if not isinstance(record.get("measured", {}), dict):
        raise ValueError("it does not say what was measured")
    numbers = [value for metrics in results.values() for value in metrics.values()]
    if not all(isinstance(value, int | float) and not abs(value) >= LARGEST for value in numbers):
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
                left_out(file, error)
    return sorted(found, key=lambda record: record["step"])


def read_galleries(run_dir: Path, most: int) -> list[tuple[Record, np.ndarray]]:
    """The retrieved examples of at most `most` sets: description and picture."""
    found: list[tuple[Record, np.ndarray]] = []
    for file in sorted((run_dir / "eval" / "retrieved").glob("*.json")):
        try:
            record = files.read_json(file)
            _GALLERY.validate_python(record, strict=True)
            if record["tile"] ** 2 * (record["columns"] + 1) * len(record["rows"]) > MOST_PIXELS:
                raise ValueError(f"the picture has more than {MOST_PIXELS} pixels")
            with files.opened(file.with_suffix(".png")) as picture:
                image = Image.open(picture, formats=["PNG"])
                if image.size != (record["tile"] * (record["columns"] + 1), record["tile"] * len(record["rows"])):
                    raise ValueError("the picture has another size than it is said to have")
                found.append((record, np.asarray(image.convert("RGB"))))
        except Exception as error:  # Pillow raises whatever the bytes lead to
            left_out(file, error)
        if len(found) == most:
            break
    return found


def left_out(file: Path, error: Exception) -> None:
    """Warn that a result file cannot be read."""
    log.warning("%s is left out: it cannot be read (%s); evaluate again", file, " ".join(str(error).split())[:300])
