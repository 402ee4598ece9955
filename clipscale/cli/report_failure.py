"""Prints why a command ended early, in one line, and gives its exit status."""

import os
import signal
import sys
import traceback

from clipscale.common.errors import StoppedError, UserError
from clipscale.common.limits import explain_limit
from clipscale.common.terminal import is_main_rank, print_failure, print_line
from clipscale.launch.failures import WorkerError


def report_failure(error: BaseException) -> int:
    """Print the failure of a command. Returns the exit status. Raises the error if it is a fault of this program.

    Every rank finds the same mistake of the user, so the main rank alone prints it.
    """
    if isinstance(error, WorkerError):
        print_failure(error, error.details)
        return 1
    if isinstance(error, KeyboardInterrupt):
        print_line("stopped", error=True)
        return 128 + signal.SIGINT
    if isinstance(error, StoppedError):
        if is_main_rank():
            print_line(error, error=True)
        return error.exit_status
    if not isinstance(error, Exception):
        raise error
    failure = explain_limit(error)
    if not isinstance(failure, UserError | OSError):  # OSError: a folder without permission, a full disk
        raise error
    # The output's pipe was closed (`| head`). Verbs that write files have replaced stdout, and never get here.
    if isinstance(failure, BrokenPipeError) and sys.stdout is sys.__stdout__ and sys.stdout:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if os.environ.get("CLIPSCALE_DEBUG") == "1":
        traceback.print_exception(error)
    if is_main_rank():
        print_failure(failure)
    return failure.exit_status if isinstance(failure, UserError) else 1
