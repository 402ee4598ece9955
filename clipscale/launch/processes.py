"""Whether a process of this machine lives, by its number and its start. The clock, which may jump, has no part in it.

A rank ends with the process that has started it: a launcher of ours, or torchrun's agent.
"""

import ctypes
import os
import signal
from pathlib import Path

ALIVE, STOPPED, DEAD = "alive", "stopped", "dead"
LAUNCHER = "CLIPSCALE_LAUNCHER"
"""Names the process that starts the ranks: its number and its start."""
PR_SET_PDEATHSIG = 1
"""Linux's number of the option of prctl."""


def started(pid: int) -> float:
    """When a process began: ticks since the machine's start. 0: there is no such process."""
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
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], float(fields[19])
    except (OSError, ValueError, IndexError):
        return "X", 0.0


def as_launcher() -> dict[str, str]:
    """The variable by which ranks know this process as their launcher."""
    return {LAUNCHER: f"{os.getpid()} {started(os.getpid())}"}


def end_with_launcher() -> None:
    """Let the kernel kill this rank when the process that has started it dies, however it dies.

    Does nothing without a launcher of ours or torchrun's agent: srun, for one, ends its tasks by itself.
    """
    if not {LAUNCHER, "TORCHELASTIC_RUN_ID"} & set(os.environ):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    pid, _, begun = os.environ.pop(LAUNCHER, "").partition(" ")
    if os.getppid() != parent or (pid and state(int(pid), float(begun)) == DEAD):  # it died before
        os.kill(os.getpid(), signal.SIGKILL)
