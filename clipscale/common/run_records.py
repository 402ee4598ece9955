"""The records of a run: what its folder holds beside its checkpoints. Imports nothing heavy."""

import re
from dataclasses import dataclass

# One JSON object a step.
METRICS = "metrics.jsonl"
# The folder of evaluations.
EVAL = "eval"
# What the run returned. It exists only when the run is complete.
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
