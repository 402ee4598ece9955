"""This process's rank, from the variables that torchrun or a scheduler sets. Only this file reads them.

Also the type of a function that does work on one rank, for parts that know no process group.
"""

import os
from collections.abc import Callable
from typing import Protocol, TypeVar

from clipscale.common.errors import UserError

T = TypeVar("T")
# Variables that have to be numbers, besides RANK, WORLD_SIZE and MASTER_PORT.
NUMBERS = (
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_RESTART_COUNT",
    "SLURM_RESTART_COUNT",
)  # fmt: skip


class OnRank0(Protocol):
    """Calls a function on rank 0, and returns its result on every rank, as `agreement.run_on_rank0` does."""

    def __call__(self, work: Callable[[], T], /) -> T: ...


def in_this_process(work: Callable[[], T], /) -> T:
    """`OnRank0` where there is one process."""
    return work()


def env_int(name: str, default: int) -> int:
    """The whole number in an environment variable. Raises UserError for any other text."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"{name}={text!r} in the environment is not a number; unset it, or start with torchrun")
    return int(text)


def under_launcher() -> bool:
    """Whether this process was started as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    return env_int("RANK", 0)


def size() -> int:
    """The number of ranks on all machines."""
    return env_int("WORLD_SIZE", 1) if under_launcher() else 1


def local_rank() -> int:
    """This process's number among the ranks of its machine."""
    return env_int("LOCAL_RANK", 0)


def local_world_size(unknown: int = 1) -> int:
    """The number of ranks on this machine, which share its cores and memory; `unknown` if no variable says it."""
    return max(1, env_int("LOCAL_WORLD_SIZE", unknown))


def is_restarted() -> bool:
    """Whether torchrun or Slurm says that it has started this process again."""
    return any(env_int(f"{launcher}_RESTART_COUNT", 0) for launcher in ("TORCHELASTIC", "SLURM"))


def check_variables() -> None:
    """Raise UserError if variables of a launcher are not numbers, or contradict each other."""
    for name in NUMBERS:
        env_int(name, 0)
    problem = ""
    if not under_launcher():
        problem = "comes without WORLD_SIZE" if "RANK" in os.environ else ""
    elif rank() >= size():
        problem = f"is not a rank of WORLD_SIZE={size()}"
    elif size() > 1 and not (os.environ.get("MASTER_ADDR") and 0 < env_int("MASTER_PORT", 0) < 2**16):
        problem = "needs MASTER_ADDR, and a port as MASTER_PORT"
    if problem:
        raise UserError(f"RANK={os.environ['RANK']} of the environment {problem}; start with torchrun, or unset RANK")
