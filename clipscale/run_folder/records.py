"""The records of a run: the files beside its checkpoints in one table, and their readers. Imports nothing heavy."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from clipscale.common import files
from clipscale.common.record import EvalRecord, Record, RunResult
from clipscale.run_folder.paths import CONFIG, ENVIRONMENT, EVAL, METRICS, RESULT


@dataclass(frozen=True)
class RunRecord:
    """A file or a folder of records."""

    name: str
    # Whether it holds measurements. A run that begins anew moves records aside if one of these is not empty.
    is_measurement: bool = False
    # Pattern of paths in the run's folder: these files are copied with the run. Empty if none are.
    copied: str = ""
    # Pattern of the names of those files that `files.replacing` writes.
    replaced: str = ""


def record_file(name: str, *, is_measurement: bool = False) -> RunRecord:
    """A record that is one file. It is copied, and written by `files.replacing`."""
    return RunRecord(name, is_measurement, copied=re.escape(name), replaced=re.escape(name))


RUN_RECORDS = (
    record_file(METRICS, is_measurement=True),
    RunRecord(EVAL, is_measurement=True, copied=rf"{EVAL}/step_[^/]*\.json", replaced=r"step_\d+\.json|final\.json"),
    record_file(RESULT, is_measurement=True),
    record_file(CONFIG),
    record_file(ENVIRONMENT),
    RunRecord("report.html"),
    RunRecord("tensorboard"),
    RunRecord("wandb"),
)


def written_settings(run_dir: Path) -> Record:
    """The settings in a run's config.yaml; empty if there is no such file. Raises DAMAGED of `files`."""
    file = run_dir / CONFIG
    return files.read_record(file) if file.is_file() else {}


def settings_of_run(run_dir: Path) -> Record:
    """The settings of a run; empty if it has none. Raises UserError where its file is damaged."""
    path = run_dir / CONFIG
    with files.damage_to_user_error("the run's", path, "start the run again, which sets it aside, or move it away"):
        return files.read_record(path)


def read_evaluation(path: Path) -> EvalRecord:
    """The file of an evaluation; empty if there is none. Raises DAMAGED of `files`."""
    record = files.read_record(path)
    for key in ("results", "measured"):
        for values in files.named_values(record.get(key, {})).values():
            files.named_values(values)
    return cast(EvalRecord, record)


def read_result(path: Path) -> RunResult:
    """The file of a complete run's result. Raises DAMAGED of `files`, also if there is none."""
    record = files.read_record(path)
    results = files.named_values(record.get("eval")).values()
    values = [value for metrics in results for value in files.named_values(metrics).values()]
    if type(record.get("step")) is not int or not all(isinstance(value, int | float) for value in values):
        raise ValueError("it holds no result")
    return cast(RunResult, record)
