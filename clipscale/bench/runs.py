"""Whole training runs as measurements: each in a process of its own, with what it ran on, and beside what `clipscale plan` says of it.

    python -m clipscale.bench.runs --record FILE --run runs/NAME --seconds 60 KEY=VALUE ...

appends a line to FILE: the command of `clipscale train`, the machine, the last steps, prediction and measurement. A run that FILE holds
already, of the same command, code, machine and versions, is not run again.
"""

import argparse
import json
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from clipscale.bench.machine import facts
from clipscale.bench.memory import address_space, is_out_of_memory, name_first
from clipscale.errors import UserError

Row = dict[str, Any]

STEPS = 3
"""Steps at the end of a run that are kept."""
GRACE = 20.0
"""Seconds that a run that is told to end has for it."""
NO_ROOM = ("are free for each of", "larger than foreseen", "was killed by SIGKILL", "samples fit the device")
"""What the program's own refusals for want of memory say (data/room.py, tiers.py, workers.py, probe.py)."""


@dataclass(frozen=True)
class Attempt:
    """How a run ended."""

    status: str
    """`ok`; `refused`: the program said that memory does not suffice; `out of memory`; `no time`; `failed`: anything else."""
    reason: str
    seconds: float

    @property
    def too_large(self) -> bool:
        return self.status in ("refused", "out of memory")


def attempt(run: Path, words: Sequence[str], seconds: float, memory: int | None = None) -> Attempt:
    """`clipscale train run=RUN WORDS...` in a fresh process, begun anew, for `seconds` at most.

    `memory`: bytes of address space that it may take beyond what the program itself takes; not with CUDA, which reserves more than that.
    """
    shutil.rmtree(run, ignore_errors=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="clipscale-bench-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({"words": [f"run={run}", *words], "memory": memory}))
        with (folder / "said").open("wb") as said:
            command = [sys.executable, "-m", "clipscale.bench.runs", "--job", name]
            process = subprocess.Popen(command, stdout=said, stderr=said)
            try:
                process.wait(max(1.0, seconds))
                late = False
            except subprocess.TimeoutExpired:
                late = True
            finally:
                end(process)
        outcome = folder / "outcome.json"
        if late:
            status, reason = "no time", f"not done within {seconds:.0f} s"
        elif outcome.exists():
            status, reason = json.loads(outcome.read_text())
        else:
            status, reason = died(process.returncode, (folder / "said").read_text(errors="replace"))
    return Attempt(status, reason, time.monotonic() - start)


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt it, so that it ends its workers, and if that does not help, kill it."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def died(status: int, said: str) -> tuple[str, str]:
    """Of a process that left no word of its own."""
    if status == -signal.SIGKILL:
        return "out of memory", "the system ended the process (SIGKILL)"
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    return "failed", f"the process ended with status {status}: {last[:300]}"


def judged(error: Exception) -> tuple[str, str]:
    """Status and reason of a run that raised."""
    reason = " ".join(str(error).split())[:300]
    if isinstance(error, UserError):
        return ("refused" if any(sign in reason for sign in NO_ROOM) else "failed"), reason
    return ("out of memory" if is_out_of_memory(error) else "failed"), f"{type(error).__name__}: {reason}"


def job(folder: Path) -> int:
    """What the fresh process does: the run, and how it ended, in outcome.json."""
    from clipscale import cli

    asked = json.loads((folder / "job.json").read_text())
    name_first()
    if asked["memory"] is not None:
        import_module("clipscale.train")  # it is the program itself, which does not count
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + asked["memory"], hard))
    try:
        status = cli.dispatch(["train", *asked["words"]])
        outcome = ("ok", "") if status == 0 else ("failed", f"status {status}")
    except Exception as error:
        traceback.print_exc()
        outcome = judged(error)
    (folder / "outcome.json").write_text(json.dumps(outcome))
    return 0


# ---- records ----


def line_of(run: Path, words: Sequence[str], command: str) -> Row:
    """A line of a record: what was run, on what, its last steps, and prediction beside measurement."""
    from clipscale.plan.compare import compare
    from clipscale.plan.config import PlanConfig

    steps = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "run": run.name,
        "settings": list(words),
        "machine": facts(command),
        "steps": steps[-STEPS:],
        "predicted": compare(PlanConfig(run=str(run))),
    }


def recorded(record: Path, run: Path, words: Sequence[str]) -> bool:
    """Is there a line of this very run, of the same code, machine and versions."""
    now = marks(facts(""))
    lines = record.read_text().splitlines() if record.exists() else []
    return any(
        row["run"] == run.name and row["settings"] == list(words) and marks(row["machine"]) == now
        for row in map(json.loads, lines)
    )


def marks(machine: Row) -> Row:
    """What has to be the same for two measurements to be of the same thing."""
    return {key: machine[key] for key in ("code", "cpu", "gpus", "versions")}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="the file, a JSON object a line")
    parser.add_argument("--run", type=Path, help="the run's folder; what is there is removed")
    parser.add_argument("--seconds", type=float, default=60.0, help="the run may take")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="settings of clipscale train")
    given = parser.parse_args(argv)
    if given.job:
        return job(given.job)
    if not (given.record and given.run):
        parser.error("give --record and --run")
    if recorded(given.record, given.run, given.words):
        print(f"{given.run.name}: recorded already")
        return 0
    found = attempt(given.run, given.words, given.seconds)
    print(json.dumps({"run": given.run.name} | asdict(found)))
    if found.status != "ok":
        return 1
    command = f"clipscale train run={given.run} {' '.join(given.words)}"
    given.record.parent.mkdir(parents=True, exist_ok=True)
    with given.record.open("a") as file:
        file.write(json.dumps(line_of(given.run, given.words, command)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
