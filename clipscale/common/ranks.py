"""What torchrun, or a scheduler that sets the same variables, says of this process. Nothing else reads them."""

import os


def several() -> bool:
    """Whether this process was started as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def size() -> int:
    """The ranks of all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Of the ranks of this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def of_machine(unknown: int = 1) -> int:
    """The ranks of this machine, which share its cores and memory; `unknown`: where nothing says it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", unknown))
