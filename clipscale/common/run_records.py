"""The records of a run: what its folder holds beside its checkpoints. Imports nothing heavy."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from clipscale.common import files
from clipscale.common.record import EvalRecord, Record

# One JSON object a step.
METRICS = "metrics.jsonl"
# The folder of evaluations.
EVAL = "eval"
# The run's result. It exists only when the run is complete.
RESULT = "result.json"
# The settings.
CONFIG = "config.yaml"
# Machine, versions and commit.
ENVIRONMENT = "env.json"


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


def settings_of_run(folder: Path) -> Record:
    """The settings of a run; empty if it has none. Raises UserError where its file is damaged."""
    path = folder / CONFIG
    with files.damage_to_user_error("the run's", path, "start the run again, which sets it aside, or move it away"):
        return files.read_record(path)


def read_evaluation(path: Path) -> EvalRecord:
    """The file of an evaluation; empty if there is none. Raises DAMAGED of `files`."""
    record = files.read_record(path)
    for key in ("results", "measured"):
        if not isinstance(record.get(key, {}), dict):
            raise ValueError("it holds no values with names")
    return cast(EvalRecord, record)
