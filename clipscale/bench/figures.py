"""What the benchmarks share: lists of counts as settings, measurements summed up, and the name of what they were made on."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from clipscale.errors import UserError
from clipscale.units import parse_count


def counts(name: str, text: str) -> list[int]:
    """`1k,2k` as integers. Raises UserError for what is no count, and for 0."""
    try:
        found = [parse_count(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise UserError(f"{name}={text}: {error}") from error
    if 0 in found:
        raise UserError(f"{name}={text}: must be at least 1")
    return found


def device_of(setting: str) -> str:
    """`cuda` or `cpu`, by device=`auto` (CUDA where there is one), `cuda` or `cpu`. Raises UserError."""
    if setting not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={setting}: give auto, cpu or cuda")
    if setting == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: torch finds no CUDA device; use device=cpu")
    return "cuda" if setting != "cpu" and torch.cuda.is_available() else "cpu"


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least, most, and all in their order."""
    return {"median": median(values), "min": min(values), "max": max(values), "all": list(values)}


def processor(facts: dict[str, Any], device: str = "cpu", threads: int | None = None) -> str:
    """What a record's machine computed on: the GPU's name, or the CPU's with its threads, or cores."""
    if device == "cuda":
        return str(facts["gpus"][0])
    return f"{facts['cpu']}, {facts['cpus']} cores" if threads is None else f"{facts['cpu']}, {threads} threads"
