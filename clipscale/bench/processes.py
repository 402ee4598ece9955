"""Fresh processes for measuring: started with a job, watched, told to end, and asked for their answers.

A process is `python -m MODULE FOLDER RANK`: it reads FOLDER/job.json (`job_in`) and writes FOLDER/answer-RANK.json (`leave`), once or
several times.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

RETURNING_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
"""Memory that is freed goes back to the system at once, so that the resident set is what is in use (mallopt(3))."""
KEEPING_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""What is freed stays in the process, so that large blocks are not fetched from the system, page by page, in every step (mallopt(3))."""
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Answer = dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it left."""

    answer: Answer | None
    """Its last one."""
    status: int | None
    """As the system gave it; None: it was ended here, since its time was up or another rank had failed."""
    said: str
    """Standard output and error."""

    @property
    def cause(self) -> tuple[str, str]:
        """Of a process that left no word of its own: `out of memory` or `failed`, and the reason."""
        if self.status == -signal.SIGKILL:
            return "out of memory", "the system ended the process (SIGKILL)"
        if self.status is not None and self.status < 0:
            return "failed", f"the process ended by {signal.Signals(-self.status).name}"
        last = next((line.strip() for line in reversed(self.said.splitlines()) if line.strip()), "")
        return "failed", f"the process ended with status {self.status}: {last[:300]}"


def run(
    module: str,
    job: Any,
    *,
    ranks: int = 1,
    variables: Mapping[str, str] = MappingProxyType({}),
    seconds: float | None = None,
    grace: float = 0.0,
    tell: Callable[[Answer], object] | None = None,
) -> list[Ended]:
    """How `ranks` processes of a module ended that were given `job` (what JSON can hold), in rank order.

    When one fails, the others are ended. `variables` are added to the environment. After `seconds` all are interrupted, and those that have
    processes of their own to end get `grace` seconds for it. `tell` hears the answer of rank 0 whenever it is left anew.
    """
    environment = {key: value for key, value in os.environ.items() if key not in TORCHRUN} | dict(variables)
    end = None if seconds is None else time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="clipscale-bench-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                command = [sys.executable, "-m", module, name, str(rank)]
                with (folder / f"said-{rank}").open("wb") as said:
                    processes.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))
            _watch(processes, folder / "answer-0.json", end, tell)
        finally:
            statuses = [process.poll() for process in processes]
            for process in processes:
                _end(process, grace)
        return [
            Ended(_left(folder, rank), status, (folder / f"said-{rank}").read_text(errors="replace"))
            for rank, status in enumerate(statuses)
        ]


def job_in(folder: Path) -> Answer:
    """What a process that measures is to do. From here on it heeds interrupts, which a shell's background jobs are born without."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found: Answer = json.loads((folder / "job.json").read_text())
    return found


def leave(folder: Path, answer: Any, rank: int = 0) -> None:
    """The answer of a process that measures, whole or not at all, in the place of an earlier one."""
    part = folder / f"answer-{rank}.part"
    part.write_text(json.dumps(answer))
    part.rename(part.with_suffix(".json"))


def _watch(
    processes: list[subprocess.Popen[bytes]], first: Path, end: float | None, tell: Callable[[Answer], object] | None
) -> None:
    """Return when all have ended, one has failed, or time is up."""
    seen = 0
    while any(process.poll() is None for process in processes) and not any(p.poll() for p in processes):
        time.sleep(0.02)
        if end is not None and time.monotonic() > end:
            return
        if tell and first.exists() and first.stat().st_mtime_ns != seen:
            seen = first.stat().st_mtime_ns
            tell(json.loads(first.read_text()))
    if any(p.poll() for p in processes):
        time.sleep(0.2)  # ranks that fail together leave together


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Interrupt it, so that it ends its own processes, and if that does not help, kill it."""
    if process.poll() is None and grace:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    process.kill()
    process.wait()


def _left(folder: Path, rank: int) -> Answer | None:
    path = folder / f"answer-{rank}.json"
    return json.loads(path.read_text()) if path.exists() else None
