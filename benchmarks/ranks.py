"""Whether several GPUs compute what one does, and how much faster: the first ten minutes of a machine with many.

    python benchmarks/ranks.py gpus=8

Short runs of `clipscale train` on the demo set (make it first: `clipscale data demo`), each a row of the record:

- right: a small model in float32 with one process, then with all of them, by every exchange of the loss and by DDP and
  FSDP2; `distance`: the largest relative distance of a step's loss and gradient norm from one process's.
- killed: a run that SIGKILL ends in the middle and the same command finishes; `distance` from one that was not killed.
- speed: a larger model with 1, 2, 4, ... processes and equal samples each; `scaling`: over so many times one's rate.
"""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from statistics import median
from types import SimpleNamespace
from typing import Any

from measure import Row, main

DEFAULTS = {
    "gpus": 8,
    "device": "cuda",
    "model": "vit-b16",  # of the speeds
    "local": 768,  # samples of a process in a step of the speeds
    "steps": 12,
    "out": "runs/bench",
}
SMALL = ["model=tiny", "data=demo", "batch=512", "cache.chunk=32", "precision=fp32", "data.workers=1"]
QUIET = ["eval.sets=[]", "eval.every=0", "plan=false", "log.every=1", "checkpoint.every=0", "schedule.warmup=0"]
WAYS = {
    "ddp ring": ["loss.exchange=ring"],
    "ddp gather": ["loss.exchange=gather"],
    "zero2": ["launch.parallel=zero2"],
    "zero3": ["launch.parallel=zero3"],
}


def command(run: Path, procs: int, device: str, words: Sequence[str]) -> list[str]:
    where = [f"run={run}", f"device={device}", f"launch.procs={procs}"]
    return [sys.executable, "-m", "clipscale", "train", *words, *QUIET, *where]


def train(run: Path, procs: int, device: str, words: Sequence[str]) -> list[Row]:
    """The steps of a new run. Raises CalledProcessError where it fails."""
    rmtree(run, ignore_errors=True)
    subprocess.run(command(run, procs, device, words), check=True, stdout=subprocess.DEVNULL)
    return steps_of(run)


def steps_of(run: Path) -> list[Row]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def distance(actual: Sequence[Row], required: Sequence[Row]) -> float:
    """Infinite where steps are missing."""
    if [row["step"] for row in actual] != [row["step"] for row in required]:
        return float("inf")
    pairs = [(a[key], b[key]) for a, b in zip(actual, required, strict=True) for key in ("loss", "grad_norm")]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    runs = tempfile.mkdtemp(prefix="clipscale-ranks-")  # beside no record: a borrowed machine gives back few files
    atexit.register(shutil.rmtree, runs, ignore_errors=True)
    common = {key: value for key, value in vars(settings).items() if key != "out"} | {"runs": runs}
    jobs: list[Row] = [{"case": "right", "method": way} for way in WAYS] + [{"case": "killed", "method": "ddp"}]
    counts = [count for count in (1, 2, 4, 8, 16) if count <= settings.gpus]
    jobs += [{"case": "speed", "method": f"{count} processes", "procs": count} for count in counts]
    return f"ranks-{settings.device}", [job | common for job in jobs]


def measure(**job: Any) -> list[Row]:
    return {"right": right, "killed": killed, "speed": speed}[job["case"]](job, Path(job["runs"]))


def right(job: Row, runs: Path) -> list[Row]:
    words = [*SMALL, "samples=4k", *WAYS[job["method"]]]
    alone = runs / "alone"
    required = steps_of(alone) or train(alone, 1, job["device"], [*SMALL, "samples=4k"])
    return [{"distance": distance(train(runs / "right", job["gpus"], job["device"], words), required)}]


def killed(job: Row, runs: Path) -> list[Row]:
    """The checkpoint of every second step is what the second start finds."""
    words = [*SMALL, "samples=8k"]
    required = train(runs / "whole", job["gpus"], job["device"], words)
    run = runs / "killed"
    rmtree(run, ignore_errors=True)
    again = command(run, job["gpus"], job["device"], [*words, "checkpoint.every=2"])
    again.remove("checkpoint.every=0")
    process = subprocess.Popen(again, stdout=subprocess.DEVNULL, start_new_session=True)
    while len(steps_of(run)) < 6 and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = len(steps_of(run))
    subprocess.run(again, check=True, stdout=subprocess.DEVNULL)
    return [{"killed_after": done, "distance": distance(steps_of(run), required)}]


def speed(job: Row, runs: Path) -> list[Row]:
    batch = job["procs"] * job["local"]
    precision = "bf16" if job["device"] == "cuda" else "fp32"
    words = [f"model={job['model']}", "data=demo", f"batch={batch}", f"samples={job['steps'] * batch}"]
    steps = train(runs / "speed", job["procs"], job["device"], [*words, f"precision={precision}"])
    settled = steps[len(steps) // 2 :]
    parts = {part: median(row[part] for row in settled) for part in ("encode_s", "loss_s", "replay_s", "optim_s")}
    return [{"samples_per_s": median(row["samples_per_s"] for row in settled), "parts": parts}]


def compare(rows: list[Row]) -> None:
    """The rate of each count of processes over so many times that of one."""
    one = next((row["samples_per_s"] for row in rows if row.get("procs") == 1 and "samples_per_s" in row), None)
    for row in rows:
        if one and "samples_per_s" in row:
            row["scaling"] = row["samples_per_s"] / (row["procs"] * one)


COLUMNS = {
    "case": lambda row: row["case"],
    "method": lambda row: row["method"],
    "distance": lambda row: f"{row['distance']:.1e}",
    "samples/s": lambda row: f"{row['samples_per_s']:,.0f}",
    "scaling": lambda row: f"{row['scaling']:.2f}",
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS, compare)
