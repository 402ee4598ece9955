"""The model card of an export: how the model was trained and how well it scored, from the run's own files."""

import json
from functools import reduce
from pathlib import Path

import yaml

from clipscale import __version__
from clipscale.common import files
from clipscale.config.sections import ModelConfig
from clipscale.models.towers import ClipModel
from clipscale.report.evaluations import read_evaluations
from clipscale.report.table import TextTable, result_tables

SHOWN = ("batch", "samples", "epochs", "loss.objective", "optim.name", "optim.lr", "schedule.name", "schedule.warmup",
         "precision.name", "seed")  # fmt: skip
"""Settings of the run in the card, as far as they are set."""


def card(run: Path, model: ClipModel, config: ModelConfig, note: dict[str, str], call: str, library: str) -> str:
    """The text of README.md. `call` loads the folder with `library`; `note` has the run, its step and which weights."""
    path = run / "config.yaml"
    settings = files.read_tree(path) if path.is_file() else {}
    rows = [("model", config.name), ("parameters", f"{sum(p.numel() for p in model.parameters()):,}")]
    rows += [("image size", str(model.image_size)), ("feature width", str(model.width))]
    rows += [("step", note["step"]), ("weights", note["weights"])]
    for name in SHOWN:
        value = reduce(lambda node, part: node.get(part, {}), name.split("."), settings)
        if value not in (None, {}):
            rows.append((name, value if isinstance(value, str) else json.dumps(value)))
    head = {"library_name": library, "tags": ["clip", "zero-shot-image-classification"]}
    parts = [f"---\n{yaml.safe_dump(head).strip()}\n---", f"# {note['run']}, step {note['step']}"]
    parts.append(f"Trained and exported with clipscale {__version__}. Load it with\n\n    {call}")
    parts.append("## Training\n\n" + TextTable(("setting", "value"), [rows], left=("value",)).markdown())
    results = [record["results"] for record in read_evaluations(run) if str(record["step"]) == note["step"]]
    for result in results:
        scores = "\n\n".join(table.markdown() for table in result_tables(result))
        parts.append(f"## Scores at this step\n\nPer cent, except counts and ranks.\n\n{scores}")
    if not results:
        parts.append("## Scores\n\nThis step has not been evaluated.")
    return "\n\n".join(parts) + "\n"
