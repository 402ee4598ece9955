"""Evaluate a model on zero-shot classification and retrieval sets."""

from dataclasses import dataclass, field


@dataclass
class EvalConfig:
    """What is evaluated, and when."""

    every: int = 0
    """Steps between evaluations during training; 0: never. The end of a run evaluates whenever there are sets."""
    sets: list[str] = field(default_factory=list)
    """Folders in CLIP_benchmark's webdataset layout; the kind (classification or retrieval) is read from the folder."""
    batch: int = 256
    """Images or captions encoded at once."""
    workers: int = 0
    """Decoding threads; 0: one per core, at most 8."""
    limit: int | None = None
    """Only the first so many images of each set."""
