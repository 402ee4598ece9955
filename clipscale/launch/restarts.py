"""Starts a run again after a failure: from its newest checkpoint, and on fewer GPUs where some are gone."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from clipscale.common import terminal
from clipscale.config.train import TrainConfig
from clipscale.launch.agent import ELASTIC, STARTED

T = TypeVar("T")

PAUSE_S = 1.0
"""Before the first restart without progress; doubled before each further one. A GPU or a file system may need it."""
LONGEST_S = 60.0


class WorkerError(Exception):
    """A worker failed, and not by a mistake of the user. The message is one line; `details` is the traceback."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def restarted(config: TrainConfig, attempt: Callable[[TrainConfig], T]) -> T:
    """`attempt(config)`, made again after a WorkerError, at most `launch.restarts` times in a row without a new checkpoint.

    A restart goes on in the run's own folder, whatever `resume` was for the start. Raises the last WorkerError, and every other error
    at once: a mistake stays a mistake.
    """
    from clipscale.checkpoint import newest_step

    used, newest = 0, newest_step(Path(config.run))
    while True:
        try:
            return attempt(config)
        except WorkerError as error:
            before, newest = newest, newest_step(Path(config.run))
            used = 0 if newest != before else used
            if used >= config.launch.restarts:
                raise
            used += 1
            go_on(config)
            where = "from its start" if newest is None else f"after step {newest}"
            terminal.report(error, error.details)
            terminal.say(f"run={config.run}: restart {used} of {config.launch.restarts}, {where}", error=True)
            time.sleep(min(PAUSE_S * 2 ** (used - 1), LONGEST_S))


def go_on(config: TrainConfig) -> None:
    """Let a restart resume from the run's own folder, whatever `resume` was for the start, if there is a checkpoint."""
    from clipscale.checkpoint import newest_step

    if newest_step(Path(config.run)) is not None:
        config.resume = "auto"


def group_size(batch: int, most: int) -> int:
    """The most processes, of at most `most`, that share a batch evenly."""
    return next(count for count in range(most, 0, -1) if batch % count == 0)


def spare(batch: int) -> bool:
    """Whether this rank of torchrun's is not needed: the nodes that are left share the batch unevenly, and fewer ranks do it evenly.

    Ranks of the smaller group then find its size in their environment. Only where the number of nodes may change.
    """
    rank, found = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    size = group_size(batch, found) if ELASTIC in os.environ else found
    if rank >= size:
        return True
    os.environ |= {"WORLD_SIZE": str(size), STARTED: str(found)}
    if rank == 0 and size < found:
        terminal.say(f"{found} processes cannot share batch={batch} evenly: the run goes on with {size}", error=True)
    return False
