"""The server that forks data workers. Imports nothing heavy, so that it starts while the rest of a run imports."""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver

from clipscale.common.signals import blocked

# What the server imports.
PRELOADED = ["__main__", "clipscale.data.loader.server_imports"]
# Most bytes of the temporary folder's path: a socket's path has at most 107, and multiprocessing's names take 32.
MAX_FOLDER_BYTES = 75


def warm_up() -> None:
    """Start the server, which imports PRELOADED. Returns at once; a second call changes nothing.

    Workers are not forked from the training process: its CUDA and process-group threads do not survive a fork.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    with blocked(), short_folder():  # workers inherit the blocked signals
        forkserver.ensure_running()


@contextmanager
def short_folder() -> Iterator[None]:
    """In this context, sockets are made in /tmp if TMPDIR is too long. Python does the same from 3.14 on."""
    usual = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > MAX_FOLDER_BYTES:
        tempfile.tempdir = "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = usual
