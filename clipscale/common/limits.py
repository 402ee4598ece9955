"""Limits of the machine that end a run: on memory, on threads, and on shared memory."""

import errno
import os
import shutil
from typing import TypeVar

from clipscale.common.errors import UserError, one_line

# Texts of errors (torch, the system, Python, the dynamic linker) that mean: a limit on memory or threads is reached.
NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "can't start new thread", "failed to map segment")
E = TypeVar("E", bound=BaseException)
# Linux's folder for shared memory.
SHARED_MEMORY = "/dev/shm"
# Errors if there is no shared memory. glibc before 2.34 answers ENOSYS if SHARED_MEMORY is not mounted.
NO_SHARED_MEMORY = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOSYS)
# SHARED_MEMORY is not full if it has this many free bytes.
MIN_SHARED_BYTES = 2**16


def explain_limit(error: E) -> "E | UserError":
    """The error, or a UserError if a limit of the machine caused it: on memory, threads or shared memory.

    The system's message about shared memory does not name its folder.
    """
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        return UserError(f"no memory is left ({one_line(error)}); raise the limit (ulimit -v, -u, the container's)")
    problem = problem_of_shared_memory(error) if isinstance(error, OSError) else ""
    if not problem:
        return error
    remedy = "mount it, or a larger one (docker run --ipc=host)"
    return UserError(f"{SHARED_MEMORY} {problem}, and processes share memory there ({error}); {remedy}")


def problem_of_shared_memory(error: OSError) -> str:
    """Why shared memory may have caused the error; empty if it has not.

    The error names no file then, or one in SHARED_MEMORY.
    """
    if error.filename is not None and not str(error.filename).startswith(SHARED_MEMORY):
        return ""
    if error.errno in NO_SHARED_MEMORY and not os.access(SHARED_MEMORY, os.W_OK):
        return "cannot be written"
    if error.errno == errno.ENOSPC and shutil.disk_usage(SHARED_MEMORY).free < MIN_SHARED_BYTES:
        return "is full"
    return ""
