"""Measures in fresh processes: a job goes in, and an answer comes back after every measurement.

`run` starts `python -m clipscale.bench.harness MODULE:FUNCTION FOLDER RANK`, watches the processes and collects what they leave.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from clipscale.files import write_json

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
    """Cases timed in interleaved rounds; a case that failed when probed is left out."""
    repeats: int = 0
    ranks: int = 1
    seconds: float | None = None
    """A step that would not end within this many seconds from the start is not begun."""
    share: float = 1.0
    """Rounds after the first begin only within this share of `seconds`."""
    memory: int | None = None
    """Bytes that a process on the CPU may take beyond what torch itself takes."""
    threads: int | None = None
    """Of a process; None: torch's choice."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*(name for name, _ in self.probed), *self.timed]))


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it left."""

    answer: Answer | None
    """Its last one."""
    status: int | None
    """The exit status; None: `run` ended the process, because its time was up or another rank failed."""
    output: str
    """Standard output and error."""

    @property
    def cause(self) -> tuple[str, str]:
        """`out of memory` or `failed`, and the reason, of a process that ended before its job did."""
        if self.status == -signal.SIGKILL:
            return "out of memory", "the system ended the process (SIGKILL)"
        if self.status is not None and self.status < 0:
            return "failed", f"the process ended by {signal.Signals(-self.status).name}"
        last = next((line.strip() for line in reversed(self.output.splitlines()) if line.strip()), "")
        return "failed", f"the process ended with status {self.status}: {last[:300]}"


@dataclass(frozen=True)
class Task:
    """A job as one of its processes sees it."""

    folder: Path
    rank: int

    @property
    def job(self) -> Answer:
        found: Answer = json.loads((self.folder / "job.json").read_text())
        return found

    def leave(self, answer: Answer) -> None:
        """Replace the answer, whole or not at all."""
        write_json(self.folder / f"answer-{self.rank}.json", answer)


def run(
    target: str,
    job: Any,
    *,
    ranks: int = 1,
    variables: Mapping[str, str] = MappingProxyType({}),
    seconds: float = math.inf,
    grace: float = 0.0,
    on_answer: Callable[[Answer], object] = lambda _: None,
) -> list[Ended]:
    """Do `job` (JSON) in `ranks` processes of `target` (MODULE:FUNCTION of a Task); how they ended, in rank order.

    If one fails, the others are ended. After `seconds` all are interrupted and get `grace` seconds to end. `on_answer` gets the answer
    of rank 0 whenever it is replaced.
    """
    environment = {key: value for key, value in os.environ.items() if key not in TORCHRUN} | dict(variables)
    end, heard = time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory(prefix="clipscale-bench-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job))
        answers = [folder / f"answer-{rank}.json" for rank in range(ranks)]
        outputs = [folder / f"output-{rank}" for rank in range(ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, path in enumerate(outputs):
                command = [sys.executable, "-m", "clipscale.bench.harness", target, name, str(rank)]
                with path.open("wb") as output:
                    processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
            while {process.poll() for process in processes} in ({None}, {None, 0}) and time.monotonic() < end:
                time.sleep(0.02)
                if answers[0].exists() and answers[0].stat().st_mtime_ns != heard:
                    heard = answers[0].stat().st_mtime_ns
                    on_answer(json.loads(answers[0].read_text()))
            if any(process.poll() for process in processes):
                time.sleep(0.2)  # ranks that fail together end together
        finally:
            statuses = [process.poll() for process in processes]
            for process in processes:
                _end(process, grace)
        return [
            Ended(
                json.loads(answer.read_text()) if answer.exists() else None, status, output.read_text(errors="replace")
            )
            for answer, status, output in zip(answers, statuses, outputs, strict=True)
        ]


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Interrupt it, so that it ends its own processes, and kill it if that does not help."""
    if process.poll() is None and grace:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    process.kill()
    process.wait()


def measure(target: str, job: Job, on_answer: Callable[[list[Answer]], object] = lambda _: None) -> list[Answer]:
    """The answers of the job's ranks; what a process did not measure before its end failed for the reason of that end.

    `on_answer` gets the answers of a job of one process as they grow.
    """
    if job.device == "cpu" and job.memory is None:
        job = replace(job, memory=int(MARGIN * psutil.virtual_memory().available / job.ranks))

    def of_one(answer: Answer) -> None:
        if job.ranks == 1:
            on_answer([answer])

    ended = run(target, asdict(job), ranks=job.ranks, variables=job.variables, on_answer=of_one)
    return [completed(job, one) for one in ended if one.status is not None]


def completed(job: Job, ended: Ended) -> Answer:
    """The answer, with a reason in every case that was not measured before the process ended."""
    answer = ended.answer or {"cases": {}, "complete": False}
    if not answer["complete"]:
        status, reason = ended.cause
        for name in job.names:
            record = answer["cases"].setdefault(name, {"status": "ok", "steps": [], "memory": {}})
            measured = record["steps"] or (name not in job.timed and (record["memory"] or "rows" in record))
            if record["status"] == "ok" and not measured:
                record |= {"status": status, "reason": reason, "traceback": ended.output[-5000:]}
    return answer


def main(target: str, folder: str, rank: str) -> None:
    """Do the job in the folder. Heeds interrupts, which a shell's background jobs ignore by default."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module, _, name = target.partition(":")
    getattr(import_module(module), name)(Task(Path(folder), int(rank)))


if __name__ == "__main__":
    main(*sys.argv[1:])
