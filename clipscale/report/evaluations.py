"""Reads a run's evaluation results. A damaged file is left out with a warning: the others can still be shown."""

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

log = logging.getLogger(__name__)

Record = dict[str, Any]
T = TypeVar("T")


def read_evaluations(run_dir: Path) -> list[Record]:
    """The contents of `eval/step_N.json`, by step: `step`, `results` (set -> metric -> value), `measured`."""

    def read(file: Path) -> Record:
        record = json.loads(file.read_text())
        return {**record, "results": dict(record["results"]), "step": int(file.stem.removeprefix("step_"))}

    return sorted(whole((run_dir / "eval").glob("step_*.json"), read), key=lambda record: int(record["step"]))


def read_galleries(run_dir: Path, most: int) -> list[tuple[Record, np.ndarray]]:
    """The retrieved examples of at most `most` sets: description and picture."""

    def read(file: Path) -> tuple[Record, np.ndarray]:
        with Image.open(file.with_suffix(".png"), formats=["PNG"]) as picture:
            return json.loads(file.read_text()), np.asarray(picture.convert("RGB"))

    return whole(sorted((run_dir / "eval" / "retrieved").glob("*.json"))[:most], read)


def whole(files: Iterable[Path], read: Callable[[Path], T]) -> list[T]:
    """What `read` makes of each file. One that is damaged is left out with a warning."""
    contents = []
    for file in files:
        try:
            contents.append(read(file))
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is left out: it cannot be read (%s); evaluate again", file, " ".join(str(error).split()))
    return contents
