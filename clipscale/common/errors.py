"""Exceptions whose message is all that the user sees."""

import errno
import os
import shutil
import signal
from typing import TypeVar

from clipscale.common.terminal import printable


class UserError(Exception):
    """A mistake in the settings, the data or the machine that the user can fix.

    The message is one line: the setting, its value, and the remedy. The command line prints it as `error: ...` without
    a traceback and exits with status 2. Control characters, such as newlines in the value, are escaped.
    """

    saves: bool | None = None
    """Whether a run that it ends saves: True, all ranks raise it; False, it came within an update; None: one process
    does."""

    def __init__(self, message: object, *, saves: bool | None = None) -> None:
        super().__init__(printable(message))
        self.saves = self.saves if saves is None else saves


class StoppedError(UserError):
    """A signal stopped the run after a checkpoint. The command line exits with 128 + `number`, as for the signal."""

    def __init__(self, message: str, number: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.number = number


class DataError(UserError):
    """The data do not go on."""

    saves = True


class LoaderError(DataError):
    """A data worker has died or is silent, or the storage is out of reach. The command line exits with status 1: the
    same settings may well go on.
    """


E = TypeVar("E", bound=BaseException)
SEMAPHORES = "/dev/shm"
LEAST_SHARED = 2**16
"""Where Linux keeps what processes share, and bytes of it that suffice."""


def explained(error: E) -> "E | UserError":
    """The error, or a UserError where it is one of shared memory, whose folder the system does not name."""
    problem = "" if os.access(SEMAPHORES, os.W_OK) else "cannot be written"
    if not problem and getattr(error, "errno", 0) == errno.ENOSPC and shutil.disk_usage(SEMAPHORES).free < LEAST_SHARED:
        problem = "is full"
    if not problem or not isinstance(error, OSError):
        return error
    remedy = "mount it, or a larger one (docker run --ipc=host)"
    return UserError(f"{SEMAPHORES} {problem}, and processes share memory there ({error}); {remedy}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its kind, where there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line(error: BaseException) -> str:
    """An error's message without newlines, at most 300 characters of it; its kind, where there is none."""
    return " ".join(str(error).split())[:300] or type(error).__name__
