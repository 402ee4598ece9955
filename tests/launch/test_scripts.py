"""What launch/*.sh ask of a scheduler, with stand-ins for its commands. test_slurm.py runs the real ones."""

import os
import subprocess
from pathlib import Path

import pytest

from clipscale.config.presets import PACKAGE

JOB = {"SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}


def run_slurm_script(folder: Path, **variables: str) -> list[str]:
    """The words that launch/slurm.sh gives to srun."""
    for name, body in (("srun", 'printf "%s\\n" "$@"'), ("scontrol", "echo a")):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SRUN_"))}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    script = PACKAGE.parent / "launch/slurm.sh"
    done = subprocess.run(
        ["bash", str(script), "run=x"], env=inherited | JOB | variables | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("variables", "wanted"), [({"SLURM_CPUS_PER_TASK": "12"}, ["--cpus-per-task=12"]), ({}, [])])
def test_a_task_gets_all_cores_that_the_job_asked_for(
    variables: dict[str, str], wanted: list[str], tmp_path: Path
) -> None:
    words = run_slurm_script(tmp_path, **variables)
    assert [word for word in words if word.startswith("--cpus-per-task")] == wanted
    assert words[-1] == "run=x" and "--kill-on-bad-exit=0" in words
