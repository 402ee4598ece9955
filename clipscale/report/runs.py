"""What a report shows of runs, read from their folders. Raises UserError for a damaged file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import printable
from clipscale.common.units import run_folder
from clipscale.config.setting import flat
from clipscale.config.tools import existing_run

Record = dict[str, Any]


@dataclass
class Run:
    """A run's folder. `rows` are the records of its steps, with `hours` of work, and one for each evaluation with
    `eval/SET/METRIC`; `predicted` is what `plan` has of the records' fields.
    """

    name: str
    folder: Path
    records: list[Record]
    evaluations: list[Record]
    rows: list[Record]
    settings: dict[str, str]
    environment: Record
    predicted: Record


def read_runs(names: Sequence[str | Path]) -> list[Run]:
    """The runs of these names, or folders; a sweep's folder means all of its runs."""
    folders: list[Path] = []
    for name in (str(name.resolve()) if isinstance(name, Path) else name for name in names):
        inside = sorted(path.parent for path in run_folder(name).glob("*/config.yaml"))
        folders += inside if inside and not (run_folder(name) / "config.yaml").exists() else [existing_run(name)]
    runs = [run for run in map(_read, folders) if run.records]
    if not runs:
        raise UserError(f"run={','.join(map(str, names))}: metrics.jsonl holds no step to report on")
    known = [run.name for run in runs]
    for run in runs:
        run.name = printable(run.name if known.count(run.name) == 1 else run.folder)
    return runs


def _read(folder: Path) -> Run:
    records = read_metrics(folder / "metrics.jsonl")
    seconds = accumulate(r["batch"] / r["samples_per_s_wall"] if r.get("samples_per_s_wall") else 0 for r in records)
    rows = [record | {"hours": passed / 3600} for record, passed in zip(records, seconds)]
    at = {row["step"]: {name: row[name] for name in ("step", "samples", "hours")} for row in rows}
    evaluations = [e for e in read_evaluations(folder) if e["step"] in at]
    rows += [
        at[e["step"]] | {f"eval/{n}/{k}": v for n, m in e["results"].items() for k, v in m.items()} for e in evaluations
    ]
    config, environment, plan = (_content(folder / name) for name in ("config.yaml", "env.json", "plan.json"))
    settings = {name: str(value) for name, value in flat(config)}
    # What was predicted, by the names of the records.
    predicted = {f"mem_{n}_bytes": p["extra_bytes"] for n, p in plan.get("device", {}).get("phases", {}).items()}
    predicted |= {"mem_peak_bytes": plan["peak_bytes"]} | (plan["time"] or {}) if predicted else {}
    return Run(folder.resolve().name, folder, records, evaluations, rows, settings, environment, predicted)


def _content(path: Path) -> Record:
    with files.reported("the run's", path, "restore it, or move it away"):
        return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}  # JSON is YAML


def read_metrics(path: Path) -> list[Record]:
    """The records of a `metrics.jsonl`, in order, without an incomplete last line."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    with files.reported("metrics", path, "restore the file, or move it away"):
        return [json.loads(line) for line in lines if line.endswith(b"\n")]


def read_evaluations(run_dir: Path) -> list[Record]:
    """The contents of `eval/step_N.json`, by step: `step`, `results` (set -> metric -> value), `measured`."""
    records = []
    for file in (run_dir / "eval").glob("step_*.json"):
        with files.reported("results", file, "evaluate again"):
            records.append(json.loads(file.read_text()) | {"step": int(file.stem.removeprefix("step_"))})
    return sorted(records, key=lambda record: int(record["step"]))


def read_galleries(run_dir: Path, step: str = "**") -> list[tuple[Record, Image.Image]]:
    """The retrieved examples by set and step: description and picture, as clipscale.eval.examples writes them."""
    galleries = []
    for file in (run_dir / "eval" / "retrieved").glob(f"{step}/*.json"):
        with files.reported("retrieved examples", file, "evaluate again"):
            picture = Image.open(file.with_suffix(".png"), formats=["PNG"]).convert("RGB")
            galleries.append((json.loads(file.read_text()), picture))
    return sorted(galleries, key=lambda gallery: (gallery[0]["set"], gallery[0]["step"] or 0))
