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
    # Whether it holds measurements: with one that is not empty, an earlier run's records are moved aside.
    is_measurement: bool = False
    # Pattern of the paths of its files, in the run's folder, that a copy of the run has; empty if a copy has none.
    copied: str = ""
    # Pattern of the names of its files that `files.replacing` writes.
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
