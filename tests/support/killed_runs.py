"""Runs of two ranks, of which one is killed on its way."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from clipscale.run_folder.records import read_metrics
from tests.conftest import TINY

SETTINGS = [word for word in TINY if not word.startswith("samples")]


def started(folder: Path, environment: dict[str, str], *words: str) -> subprocess.Popen:
    """`clipscale train` of a tiny model, in a folder; its output goes to output.txt there."""
    options: dict[str, Any] = {"cwd": folder, "env": environment | {"OMP_NUM_THREADS": "1"}}
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "clipscale", "train", *SETTINGS, *words], stdout=output, **options
        )


def command(folder: Path, environment: dict[str, str], *words: str) -> None:
    with started(folder, environment, *words) as process:
        assert process.wait(timeout=240) == 0


def whole_and_killed(folder: Path, environment: dict[str, str], words: list[str]) -> tuple[Path, Path]:
    """Make two runs of 40 steps on two ranks. Returns their folders.

    One is killed after the eighth step and started again. Its losses are the other's, bit for bit.
    """
    words = [*words, "samples=640", "launch.procs=2", "checkpoint.every=3"]
    command(folder, environment, "run=whole", *words)
    log = folder / "runs/killed/metrics.jsonl"
    with started(folder, environment, "run=killed", *words) as process:
        until = time.monotonic() + 120
        while not (log.exists() and len(read_metrics(log)) >= 8):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.02)
        for one in (*psutil.Process(process.pid).children(recursive=True), process):
            one.kill()
    assert len(read_metrics(log)) < 40, "it was killed on its way"
    command(folder, environment, "run=killed", *words)
    whole = folder / "runs/whole"
    killed = folder / "runs/killed"
    losses = [{r["step"]: r["loss"] for r in read_metrics(run / "metrics.jsonl")} for run in (whole, killed)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 40
    return whole, killed
