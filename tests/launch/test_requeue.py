"""A Slurm job that comes back from the queue goes on with the run that it has begun, named or not."""

import json
import os
from pathlib import Path

import pytest

from clipscale.launch.local import requeued_run


def test_a_requeued_job_finds_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, job, age in (("older", "7", 100), ("newer", "7", 50), ("others", "8", 0), ("unread", None, 0)):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "env.json"
        file.write_text(json.dumps({"variables": {"SLURM_JOB_ID": job}}) if job else "{")
        os.utime(file, (file.stat().st_mtime - age,) * 2)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert requeued_run(tmp_path) is None, "a first start begins a run of its own"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert requeued_run(tmp_path) == str(tmp_path / "newer")
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    assert requeued_run(tmp_path) is None
