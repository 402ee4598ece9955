"""Asks the Slurm controller of this host, which .ci/slurm starts."""

import shutil
import subprocess

import pytest


def need_two_nodes() -> None:
    """Skip the test without a controller that has two nodes for a job."""
    words = ["sinfo", "-h", "-t", "idle,mix", "-o", "%D"]
    found = subprocess.run(words, capture_output=True, text=True).stdout if shutil.which("sinfo") else ""
    if sum(map(int, found.split())) < 2:
        pytest.skip("needs a Slurm controller with two idle nodes")


def state(job: str) -> str:
    """The state of a job, or of one of an array."""
    done = subprocess.run(["scontrol", "show", "job", job, "-o"], capture_output=True, text=True)
    return next(word.partition("=")[2] for word in done.stdout.split() if word.startswith("JobState="))


def jobs_named(name: str) -> list[str]:
    """The jobs of that name, and each of an array."""
    done = subprocess.run(["squeue", "-h", "-r", "-n", name, "-o", "%i"], capture_output=True, text=True, check=True)
    return done.stdout.split()
