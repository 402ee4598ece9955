"""Brings workers' failures to their launcher, by a file for each worker, and finds the one that ended the run."""

import pickle
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clipscale.common.errors import UnreachableError, UserError, one_line
from clipscale.common.limits import explain_limit

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# Phrases in errors of gloo and NCCL when another rank has ended or does not answer.
LOST_SIGNS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "timed out",
    "Application timeout", "Socket Timeout", "DistBackendError", "DistNetworkError",
)  # fmt: skip


class WorkerError(Exception):
    """A worker failed, and not through a user's mistake. The message is one line; `details` is the traceback."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class Failure:
    """A worker's message to its launcher about its failure."""

    # Whether it failed only because it lost another worker.
    has_lost_peer: bool
    # Seconds since the epoch.
    time: float
    error: UserError | WorkerError


def write_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Write a worker's exception to a file for its launcher. A user's mistake stays a UserError."""
    lost = isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_SIGNS)
    lost |= isinstance(error, UnreachableError)
    error = explain_limit(error)
    if not isinstance(error, UserError):
        details = "".join(traceback.format_exception(error))
        error = WorkerError(f"worker {rank} failed: {type(error).__name__}: {one_line(error)}", details)
    (folder / f"{rank}.failure").write_bytes(pickle.dumps(Failure(lost, time.time(), error)))


def first_failure(folder: Path) -> Failure | None:
    """The earliest failure that a worker has written, if any. Failures caused by losing a peer sort last."""
    failures: list[Failure] = [pickle.loads(file.read_bytes()) for file in folder.glob("*.failure")]
    return min(failures, key=lambda failure: (failure.has_lost_peer, failure.time), default=None)


def cause_of_end(error: "ChildFailedError", folder: Path) -> UserError | WorkerError:
    """Why the workers ended. The first of these that exists:

    1. a failure that a worker has written, unless it only lost another worker,
    2. a signal that killed a worker,
    3. the loss that a worker has written,
    4. a worker's exit status.
    """
    first = first_failure(folder)
    if first and not first.has_lost_peer:
        return first.error
    for rank, failure in error.failures.items():
        if failure.exitcode < 0:
            name = failure.signal_name()
            memory = "; the machine may be out of memory" if name == "SIGKILL" else ""
            return WorkerError(f"worker {rank} failed: killed by {name}{memory}")
    rank, failure = next(iter(error.failures.items()))
    return first.error if first else WorkerError(f"worker {rank} failed: ended with status {failure.exitcode}")
