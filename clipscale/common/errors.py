"""Exceptions whose message is all that the user sees."""

import re
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from clipscale.common.text import printable


class UserError(Exception):
    """A mistake in the settings, the data or the machine that the user can fix.

    The message is one line: the setting, its value, and the remedy. The command line prints it as `error: ...` without
    a traceback and exits with `exit_status`. Control characters, such as newlines in the value, are escaped.
    """

    # The exit status of the command line.
    exit_status = 2

    def __init__(self, message: object) -> None:
        super().__init__(printable(message))


class StoppedError(UserError):
    """A signal ended the work; a run has saved if it had trained."""

    def __init__(self, message: str, signum: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.signum = signum
        self.exit_status = 128 + signum


class DataError(UserError):
    """The training data cannot be read any further."""


class LoaderError(DataError):
    """A data worker has died or is silent, or the storage is out of reach. The same command may succeed later."""

    exit_status = 1


class UnreachableError(UserError):
    """The ranks do not reach each other. The same command may succeed later."""

    exit_status = 1


def clear_frames(error: BaseException) -> None:
    """Free the local variables of the functions that an error and its causes have ended. The error holds them."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


@contextmanager
def to_user_error(problem: str, remedy: str = "") -> Iterator[None]:
    """Context of work of a library: turns each of its errors into a UserError, `PROBLEM (why)REMEDY`.

    AttributeError, TypeError and LookupError keep their type's name in `why`, since they may be a bug of this program.
    AssertionError and NameError are bugs if this program raised them, and pass unchanged. If a library raised them, it
    refuses its input.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, AssertionError | NameError) and not _was_raised_by_library(error):
            raise
        prefix = f"{type(error).__name__}: " if isinstance(error, AttributeError | TypeError | LookupError) else ""
        raise UserError(f"{problem} ({prefix}{one_line(error)}){remedy}") from error


def _was_raised_by_library(error: BaseException) -> bool:
    """Whether the error comes from another package than the block inside `to_user_error`."""
    # The first frame is `to_user_error` itself.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame in frames]
    return packages[0] != packages[-1]


def one_line(error: BaseException) -> str:
    """An error's message on one line, at most 300 characters; the name of its type if there is no message.

    Leaves out colours and addresses of objects, which libraries write.
    """
    text = re.sub(r"\x1b\[[\d;]*m| at 0x[0-9a-f]+", "", str(error))
    return " ".join(text.split())[:300] or type(error).__name__
