"""The model card of an export: what was trained, on what, and how well it scored, from the run's own files."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from clipscale import __version__
from clipscale.common import files
from clipscale.config.sections import ModelConfig
from clipscale.models.towers import ClipModel
from clipscale.report.evaluations import read_evaluations
from clipscale.report.table import TextTable, result_tables

SHOWN = (
    "data.train", "batch", "samples", "epochs", "loss.objective", "optim.name", "optim.lr", "schedule.name", "schedule.warmup",
    "precision.name", "seed",
)  # fmt: skip
"""Settings of the run in the card, as far as they are set."""


def card(run: Path, model: ClipModel, config: ModelConfig, note: dict[str, str], call: str, library: str) -> str:
    """The text of README.md. A setting that the run's files do not hold is left out."""
    settings: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        settings = files.read_tree(run / "config.yaml")
    rows = [("model", config.name), ("parameters", f"{sum(p.numel() for p in model.parameters()):,}")]
    rows += [("image size", str(model.image_size)), ("feature width", str(model.width)), ("step", note["step"])]
    rows += [("weights", note["weights"])] + [(name, value) for name in SHOWN if (value := _value(settings, name))]
    head = {"library_name": library, "tags": ["clip", "zero-shot-image-classification"]}
    parts = ["---\n" + yaml.safe_dump(head).strip() + "\n---", f"# {note['run']}, step {note['step']}"]
    parts.append(f"Trained and exported with clipscale {__version__}. Load it with\n\n    {call}")
    parts.append("## Training\n\n" + TextTable(("setting", "value"), [rows], left=("value",)).markdown())
    at_step = [record for record in read_evaluations(run) if str(record["step"]) == note["step"]]
    for record in at_step:
        scores = "\n\n".join(table.markdown() for table in result_tables(record["results"]))
        parts.append(f"## Scores at this step\n\nPer cent, except counts and ranks.\n\n{scores}")
    if not at_step:
        parts.append("## Scores\n\nThis step has not been evaluated.")
    return "\n\n".join(parts) + "\n"


def _value(settings: dict[str, Any], name: str) -> str:
    """A setting as text; empty if it is not set."""
    node: Any = settings
    for part in name.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return "" if node is None else node if isinstance(node, str) else json.dumps(node)
