"""Finds the run of a Slurm job that has come back from the queue, where the user has not named it."""

import os
from pathlib import Path

from clipscale.files import read_json


def requeued_run(runs: Path = Path("runs")) -> str | None:
    """The newest run that this Slurm job has begun before it was requeued; None if it runs for the first time."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job or os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        return None
    found = []
    for file in runs.glob("*/env.json"):
        try:
            record = read_json(file)
        except (OSError, ValueError):
            continue
        variables = record.get("variables") if isinstance(record, dict) else None
        if isinstance(variables, dict) and variables.get("SLURM_JOB_ID") == job:
            found.append((file.stat().st_mtime, str(file.parent)))
    return max(found)[1] if found else None
