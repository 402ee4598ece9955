"""What a report shows of runs, read from their folders. Raises UserError for a damaged file."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import yaml

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.terminal import printable
from clipscale.common.units import run_folder
from clipscale.config.setting import flat
from clipscale.config.tools import existing_run
from clipscale.log.records import Record, read_evaluations, read_metrics


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
