"""Whether several GPUs compute what one does, and how much faster: the first ten minutes of a machine with many.

    python benchmarks/ranks.py gpus=8

Short runs of `clipscale train` on the demo set (make it first: `clipscale data demo`), each a row of the record:

- right: a small model in float32 with one process, then with all of them, with the loss's exchanges within one machine
  (ring, gather) under DDP and with FSDP2 (zero2, zero3). `loss`: the largest relative distance of a step's loss and
  gradient norm from one process's. `gradients`: the same of the summed gradients of each tensor (see `far_apart`).
- killed: a run that SIGKILL ends before its last step and the same command finishes, beside one that was not killed.
- speed: a larger model with 1, 2, 4, ... processes and equal samples each; `scaling`: over so many times one's rate.

A row passes if both distances are below LIMIT.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from statistics import median
from types import SimpleNamespace
from typing import Any

from measure import Row, main

from clipscale import checkpoint
from clipscale.run_folder.paths import checkpoints_of

DEFAULTS = {
    "gpus": 8,
    "device": "cuda",
    "batch": 512,  # of the small model
    "model": "vit-b16",  # of the speeds
    "local": 768,  # samples of a process in a step of the speeds
    "steps": 12,
    "out": "runs/bench",
}
# Float32 sums in another order are 1e-5 or so apart, a tensor whose gradients cancel 1e-4; a gradient that is averaged
# instead of summed, or counted twice, a half or more.
LIMIT = 1e-3
SMALL = ["model=tiny", "data=demo", "cache.chunk=32", "precision=fp32", "data.workers=1"]
# Updates that are the gradients times a number.
SGD = ["optim.name=sgd", "optim.lr=0.1", "optim.weight_decay=0", "checkpoint.every=2", "checkpoint.keep=0"]
QUIET = ["eval.sets=[]", "eval.every=0", "plan=false", "log.every=1", "schedule.warmup=0"]
# Float32 products without TF32, whose rounding would hide what is looked for.
EXACT = os.environ | {"NVIDIA_TF32_OVERRIDE": "0"}
METHODS = {
    "ddp ring": ["loss.exchange=ring"],
    "ddp gather": ["loss.exchange=gather"],
    "zero2": ["launch.parallel=zero2"],
    "zero3": ["launch.parallel=zero3"],
}


def command(run: Path, procs: int, device: str, words: Sequence[str]) -> list[str]:
    where = [f"run={run}", f"device={device}", f"launch.procs={procs}"]
    return [sys.executable, "-m", "clipscale", "train", *words, *QUIET, *where]


def train(run: Path, procs: int, device: str, words: Sequence[str], env: Mapping[str, str] = EXACT) -> list[Row]:
    """The steps of a new run. Raises RuntimeError where it fails."""
    rmtree(run, ignore_errors=True)
    finish(command(run, procs, device, words), env)
    return steps_of(run)


def finish(start: list[str], env: Mapping[str, str]) -> None:
    """Raises RuntimeError with the end of what the run has printed, where it fails."""
    done = subprocess.run(start, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {done.stderr.strip()[-250:]}")


def steps_of(run: Path) -> list[Row]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def compared(run: Path, required: Path) -> Row:
    """Distances of a run from another of the same settings, and whether both are small. Infinite where steps lack."""
    actual, expected = steps_of(run), steps_of(required)
    row: Row = {"loss": float("inf"), "gradients": float("inf")}
    if expected and [step["step"] for step in actual] == [step["step"] for step in expected]:
        pairs = [(a[key], b[key]) for a, b in zip(actual, expected, strict=True) for key in ("loss", "grad_norm")]
        row["loss"] = max(abs(a - b) / abs(b) for a, b in pairs)
        row["gradients"], row["tensor"] = far_apart(run, required)
    return row | {"limit": LIMIT, "passed": max(row["loss"], row["gradients"]) < LIMIT}


def far_apart(run: Path, required: Path) -> tuple[float, str]:
    """The largest distance of a weight tensor at the ends of two runs, over how far it has moved since the first
    checkpoint, and its name. With SGD all updates are gradients times a number."""
    first, *_, last = checkpoints_of(required)
    before, after = (checkpoint.load(path).model for path in (first, last))
    actual = checkpoint.load(checkpoints_of(run)[-1]).model
    moved = {key: (after[key] - before[key]).norm().clamp_min(1e-30) for key in after}
    return max((float((actual[key] - after[key]).norm() / moved[key]), key) for key in after)


def plan(settings: SimpleNamespace) -> tuple[str, list[Row]]:
    runs = tempfile.mkdtemp(prefix="clipscale-ranks-")  # beside no record: a borrowed machine gives back few files
    atexit.register(shutil.rmtree, runs, ignore_errors=True)
    common = {key: value for key, value in vars(settings).items() if key != "out"} | {"runs": runs}
    jobs: list[Row] = [{"case": "right", "method": method} for method in METHODS] + [
        {"case": "killed", "method": "ddp"}
    ]
    counts = [count for count in (1, 2, 4, 8, 16) if count <= settings.gpus]
    jobs += [{"case": "speed", "method": f"{count} processes", "procs": count} for count in counts]
    return f"ranks-{settings.device}", [job | common for job in jobs]


def measure(**job: Any) -> list[Row]:
    return {"right": right, "killed": killed, "speed": speed}[job["case"]](job, Path(job["runs"]))


def small(batch: int, steps: int) -> list[str]:
    return [*SMALL, *SGD, f"batch={batch}", f"samples={steps * batch}"]


def right(job: Row, runs: Path) -> list[Row]:
    words = small(job["batch"], 8)
    alone, run = runs / "alone", runs / "right"
    if not steps_of(alone):
        train(alone, 1, job["device"], words)
    train(run, job["gpus"], job["device"], [*words, *METHODS[job["method"]]])
    return [compared(run, alone)]


def killed(job: Row, runs: Path) -> list[Row]:
    """The newest checkpoint is what the second start finds. Raises RuntimeError if there is none, or no step left."""
    steps, words = 32, small(job["batch"], 32)
    whole, run = runs / "whole", runs / "killed"
    train(whole, job["gpus"], job["device"], words)
    rmtree(run, ignore_errors=True)
    start = command(run, job["gpus"], job["device"], words)
    process = subprocess.Popen(start, stdout=subprocess.DEVNULL, start_new_session=True, env=EXACT)
    while len(steps_of(run)) < 6 and process.poll() is None:
        time.sleep(0.02)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    done = len(steps_of(run))
    found = checkpoints_of(run)
    if process.wait() != -signal.SIGKILL or done >= steps or not found:
        raise RuntimeError(f"at step {done} of {steps} with {len(found)} checkpoints, so the kill shows nothing")
    finish(start, EXACT)
    return [{"killed_after": done, "steps": steps, **compared(run, whole)}]


def speed(job: Row, runs: Path) -> list[Row]:
    batch = job["procs"] * job["local"]
    precision = "bf16" if job["device"] == "cuda" else "fp32"
    words = [f"model={job['model']}", "data=demo", f"batch={batch}", f"samples={job['steps'] * batch}"]
    words += [f"precision={precision}", "checkpoint.every=0"]
    steps = train(runs / "speed", job["procs"], job["device"], words, os.environ)
    settled = steps[len(steps) // 2 :]
    parts = {part: median(row[part] for row in settled) for part in ("encode_s", "loss_s", "replay_s", "optim_s")}
    return [{"samples_per_s": median(row["samples_per_s"] for row in settled), "parts": parts}]


def compare(rows: list[Row]) -> None:
    """The rate of each count of processes, over as many times the rate of one."""
    one = next((row["samples_per_s"] for row in rows if row.get("procs") == 1 and "samples_per_s" in row), None)
    for row in rows:
        if one and "samples_per_s" in row:
            row["scaling"] = row["samples_per_s"] / (row["procs"] * one)


COLUMNS = {
    "case": lambda row: row["case"],
    "method": lambda row: row["method"],
    "killed after": lambda row: f"{row['killed_after']} of {row['steps']}",
    "loss": lambda row: f"{row['loss']:.1e}",
    "gradients": lambda row: f"{row['gradients']:.1e}",
    "limit": lambda row: f"{row['limit']:.0e}",
    "passed": lambda row: "yes" if row["passed"] else "NO",
    "samples/s": lambda row: f"{row['samples_per_s']:,.0f}",
    "scaling": lambda row: f"{row['scaling']:.2f}",
}

if __name__ == "__main__":
    main(DEFAULTS, plan, measure, COLUMNS, compare)
