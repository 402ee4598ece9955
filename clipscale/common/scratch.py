"""One folder for the temporary files of a process and of those that it starts, which the next start removes if a kill
has left it: a lock on it says that its process lives.
"""

import fcntl
import multiprocessing
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import IO

PREFIX = f"clipscale-{socket.gethostname()}-"
"""Of the folders' names: a machine that shares the place does not see who lives on another."""
LONGEST = 80
"""Characters of a folder's path without the last 8: a socket in it has at most 107, of which its own name takes 18."""
LOCK = "lock"
SEMAPHORES = Path("/dev/shm")
"""Where Linux keeps them, as sem.NAME."""


@cache
def scratch() -> Path:
    """This process's folder, until it ends; one that multiprocessing has started uses its parent's.

    multiprocessing's sockets lie in it, and its semaphores have its name. Removes what killed processes of this user
    have left.
    """
    config = vars(multiprocessing.current_process())["_config"]  # which children inherit
    if "scratch" not in config:
        remove_litter()
        folder, lock = _locked_folder()
        config["scratch"] = str(folder)
        config["semprefix"] = f"/{folder.name}"
        config.setdefault("tempdir", str(folder))
        Finalize(None, _remove, (folder, lock), exitpriority=-100)  # after all that multiprocessing does at the end
    return Path(config["scratch"])


def place() -> Path:
    """Where the folders are: TMPDIR, or /tmp where a path there is too long for a socket."""
    folder = Path(tempfile.gettempdir())
    return folder if len(f"{folder}/{PREFIX}") <= LONGEST else Path("/tmp")


def remove_litter() -> None:
    """Remove the folders, and the semaphores with their names, of this user's processes that have ended."""
    for folder in place().glob(f"{PREFIX}*"):
        # one without a lock has just begun; that of a process that lives is locked
        with suppress(OSError), (folder / LOCK).open("r+") as lock:
            if folder.stat().st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder, lock)


def _locked_folder() -> tuple[Path, IO[str]]:
    """A new folder and its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place()))
        lock = (folder / LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # nobody has taken it for litter before it was locked
            return folder, lock
        lock.close()


def _remove(folder: Path, lock: IO[str]) -> None:
    """Remove a folder whose lock is held, and give that back."""
    for semaphore in SEMAPHORES.glob(f"sem.{folder.name}-*"):
        semaphore.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()
