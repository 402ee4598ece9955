"""Measures in fresh processes: a job goes in, and an answer comes back after every measurement."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from clipscale.common.files import write_json

RETURNING_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
"""glibc returns freed memory to the system at once, so that the resident set is what is in use (mallopt(3))."""
KEEPING_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""glibc keeps freed memory in the process, so that no step waits for page faults of large blocks (mallopt(3))."""
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MARGIN = 0.95
"""Share of the free memory that the processes of a job on the CPU may take."""

Answer = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What one process, or one group of ranks, measures."""

    about: dict[str, Any]
    """What the worker builds its variants from."""
    device: str
    probed: Sequence[Sequence[Any]] = ()
    """(name, size) measured once each, in this order."""
    timed: Sequence[str] = ()
    """Cases timed in interleaved rounds; a case that failed before is left out."""
    repeats: int = 0
    ranks: int = 1
    memory: int | None = None
    """Bytes that a process on the CPU may take beyond what torch itself takes."""
    threads: int | None = None
    """Of a process; None: torch's choice."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""


def measure(worker: str, job: Job, on_answer: Callable[[list[Answer]], object] = lambda _: None) -> list[Answer]:
    """The answers of the job's ranks, each by a `worker` (MODULE:CLASS) in a process; if one fails, the others are ended.

    What a process did not measure before its end failed for the reason of that end. `on_answer` gets the answers of a job of one
    process as they grow.
    """
    if job.device == "cpu" and job.memory is None:
        job = replace(job, memory=int(MARGIN * psutil.virtual_memory().available / job.ranks))
    environment = {key: value for key, value in os.environ.items() if key not in TORCHRUN} | dict(job.variables)
    with tempfile.TemporaryDirectory(prefix="clipscale-bench-") as name:
        folder, heard = Path(name), 0
        (folder / "job.json").write_text(json.dumps(asdict(job)))
        answers, outputs = ([folder / f"{what}-{rank}" for rank in range(job.ranks)] for what in ("answer", "output"))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, path in enumerate(outputs):
                command = [sys.executable, "-m", "clipscale.bench.harness", worker, name, str(rank)]
                with path.open("wb") as output:
                    processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
            while {process.poll() for process in processes} in ({None}, {None, 0}):
                time.sleep(0.02)
                if job.ranks == 1 and answers[0].exists() and answers[0].stat().st_mtime_ns != heard:
                    heard = answers[0].stat().st_mtime_ns
                    on_answer([json.loads(answers[0].read_text())])
            if any(process.poll() for process in processes):
                time.sleep(0.2)  # ranks that fail together end together
        finally:
            statuses = [process.poll() for process in processes]
            for process in processes:
                process.kill()
                process.wait()
        return [
            completed(job, json.loads(answer.read_text()) if answer.exists() else None, status, output.read_text(errors="replace"))
            for answer, status, output in zip(answers, statuses, outputs)
            if status is not None  # ended here, because of another rank
        ]  # fmt: skip


def completed(job: Job, answer: Answer | None, status: int, output: str) -> Answer:
    """The answer, with a reason in every case that was not measured before the process ended."""
    answer = answer or {"cases": {}, "complete": False}
    if not answer["complete"]:
        failed, reason = cause(status, output)
        for name in dict.fromkeys([*(name for name, _ in job.probed), *job.timed]):
            record = answer["cases"].setdefault(name, {"status": "ok", "steps": [], "memory": {}})
            measured = record["steps"] or (name not in job.timed and (record["memory"] or "rows" in record))
            if record["status"] == "ok" and not measured:
                record |= {"status": failed, "reason": reason, "traceback": output[-5000:]}
    return answer


def cause(status: int, output: str) -> tuple[str, str]:
    """`out of memory` or `failed`, and the reason, of a process by its exit status and what it printed."""
    if status == -signal.SIGKILL:
        return "out of memory", "the system ended the process (SIGKILL)"
    if status < 0:
        return "failed", f"the process ended by {signal.Signals(-status).name}"
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    return "failed", f"the process ended with status {status}: {last[:300]}"


def main(worker: str, folder: str, rank: str) -> None:
    """Do the job in the folder. Heeds interrupts, which a shell's background jobs ignore by default."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    job = Job(**json.loads(Path(folder, "job.json").read_text()))
    if job.ranks > 1:
        import torch.distributed as dist  # starting a job needs no torch

        backend = "nccl" if job.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=int(rank), world_size=job.ranks)
    module, _, name = worker.partition(":")
    leave = partial(write_json, Path(folder, f"answer-{rank}"))  # whole or not at all
    getattr(import_module(module), name)(job, int(rank), leave).work()
    if job.ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
