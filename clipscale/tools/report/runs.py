"""Reads what a report shows of runs from their folders. Raises UserError for a damaged file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from pathlib import Path

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.common.record import Record
from clipscale.common.text import printable
from clipscale.config.parse import as_typed
from clipscale.config.setting import flatten
from clipscale.eval.published import published_line
from clipscale.run_folder.paths import ENVIRONMENT, METRICS, existing_run, run_folder, runs_of_sweep
from clipscale.run_folder.records import EvalRecord, StepRecord, read_evaluations, read_metrics, settings_of_run


@dataclass
class Run:
    """A run's folder. `rows` are the records of its steps, with `hours` of work, and one for each evaluation with
    `eval/SET/METRIC`.
    """

    name: str
    folder: Path
    records: list[StepRecord]
    evaluations: list[EvalRecord]
    rows: list[Record]
    # Setting -> its value as a user types it.
    settings: dict[str, str]
    # A line with the newest scores and the published ones; empty if none are published.
    expected: str
    environment: Mapping[str, object]


def read_runs(names: Sequence[str | Path]) -> list[Run]:
    """The runs of these names, or folders; a sweep's folder means all of its runs."""
    folders = []
    for source in names:
        name = str(source)
        folders += runs_of_sweep(run_folder(name)) or [existing_run(name)]
    runs = [run for run in map(_read, folders) if run.records]
    if not runs:
        raise UserError(f"run={','.join(map(str, names))}: metrics.jsonl holds no step to report on")
    names_of_runs = [run.name for run in runs]
    for run in runs:
        run.name = printable(run.name if names_of_runs.count(run.name) == 1 else run.folder)
    return runs


def _read(folder: Path) -> Run:
    config = settings_of_run(folder)
    with files.damage_to_user_error("the run's records", folder, "restore them, or move them away"):
        files.check_inside(folder / METRICS, folder)
        records = read_metrics(folder / METRICS)
        seconds = accumulate(record["batch"] / (record.get("samples_per_s_wall") or inf) for record in records)
        rows = [record | {"hours": passed / 3600} for record, passed in zip(records, seconds)]
        row_of_step = {row["step"]: {name: row[name] for name in ("step", "samples", "hours")} for row in rows}
        row_of_step[0] = {"step": 0, "samples": 0, "hours": 0.0}
        evaluations = [record for record in read_evaluations(folder) if record["step"] in row_of_step]
        for evaluation in evaluations:
            row = dict(row_of_step[evaluation["step"]])
            for name, metrics in evaluation["results"].items():
                row |= {f"eval/{name}/{metric}": value for metric, value in metrics.items()}
            rows.append(row)
        settings = {name: as_typed(value) for name, value in flatten(config)}
        environment = files.read_record(folder / ENVIRONMENT)
        expected = config.get("expected", {})
        line = published_line(expected, evaluations[-1]["results"]) if evaluations else ""
    return Run(
        name=folder.resolve().name,
        folder=folder,
        records=records,
        evaluations=evaluations,
        rows=rows,
        settings=settings,
        expected=line,
        environment=environment,
    )
