"""Whether a process of this machine lives, by its number and its start. The clock, which may jump, has no part in it."""

from pathlib import Path

import psutil

ALIVE, STOPPED, DEAD = "alive", "stopped", "dead"


def started(pid: int) -> float:
    """When a process began: ticks since the machine's start, or without /proc a time. 0: there is no such process."""
    return _look(pid)[1]


def state(pid: int, begun: float) -> str:
    """ALIVE, STOPPED (by SIGSTOP or a debugger) or DEAD: the state of the process with this number that began at `begun`."""
    letter, at = _look(pid)
    if at != begun or letter in "ZXx":
        return DEAD
    return STOPPED if letter in "Tt" else ALIVE


def _look(pid: int) -> tuple[str, float]:
    """The letter of a process's state, and its start."""
    if not isinstance(pid, int):  # of a damaged file
        return "X", 0.0
    try:
        if Path("/proc/self/stat").exists():
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            return fields[0], float(fields[19])
        process = psutil.Process(pid)
        return process.status()[0].upper(), process.create_time()
    except (OSError, psutil.Error, ValueError, IndexError, OverflowError):
        return "X", 0.0
