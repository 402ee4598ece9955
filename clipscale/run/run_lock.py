"""Keeps a second run out of a run's folder: rank 0 holds a lock on the folder until the run ends."""

import fcntl
import logging
import os
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from clipscale.common.errors import UserError
from clipscale.run_folder.disk import make_folder, remove_temporary
from clipscale.run_folder.paths import LOCK

log = logging.getLogger(__name__)

# Seconds to wait for a run that is ending. The end of a process frees its lock, so one that is held longer belongs to a
# live run.
WAIT_S = 10.0


class FolderInUseError(UserError):
    """Another run has the folder."""


class RunLock:
    """The lock of a run's folder: `flock` on run.lock. The kernel releases it, however the process ends.

    The file names the process and the host that hold it, for the message to others.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.file: IO[str] | None = None
        # Whether this lock has made the folder.
        self.has_made_folder = False

    def acquire(self) -> None:
        """Make the run's folder, and take its lock. Waits a short time for another holder.

        Then removes the half-written files of a dead run. Where the file system has no locks they stay, because a live
        run may be writing them. Raises FolderInUseError if another run keeps the lock.
        """
        self.has_made_folder |= not self.run_dir.exists()
        make_folder(self.run_dir)
        file = (self.run_dir / LOCK).open("a+")
        is_locked = wait_for_flock(file, self.run_dir)
        if self._was_removed(file):  # a holder that failed at its start has removed it
            file.close()
            self.acquire()
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}")
        file.flush()
        self.file = file
        if is_locked:
            remove_temporary(self.run_dir)

    def renew(self) -> bool:
        """Take the lock again if the folder was removed, and return whether it was. Raises UserError if another run has
        begun in its place."""
        assert self.file is not None
        was_removed = self._was_removed(self.file)
        if was_removed:
            self.release()
            self.acquire()
        return was_removed

    def _was_removed(self, file: IO[str]) -> bool:
        """Whether the path of the lock is no longer this file's."""
        try:
            return not os.path.samestat(os.fstat(file.fileno()), (self.run_dir / LOCK).stat())
        except FileNotFoundError:
            return True

    def release(self) -> None:
        """Give the lock back. Removes the folder if this lock has made it and nothing is in it. Safe without a lock."""
        if self.file:
            # Where the file was removed, another run may have begun in the folder.
            may_remove = self.has_made_folder and not self._was_removed(self.file)
            if may_remove and sorted(path.name for path in self.run_dir.glob("*")) == ["checkpoints", LOCK]:
                with suppress(OSError):  # the folder has other files
                    (self.run_dir / "checkpoints").rmdir()
                    (self.run_dir / LOCK).unlink()
                    self.run_dir.rmdir()
            self.file.truncate(0)
            self.file.close()
            self.file = None


def wait_until_free(run_dir: Path) -> None:
    """Wait a short time for another run in the folder. Raises FolderInUseError if that run goes on.

    Changes nothing in the folder. The command line calls it before it starts the workers, which take the lock.
    """
    with suppress(FileNotFoundError), (run_dir / LOCK).open("r+") as file:
        wait_for_flock(file, run_dir)


def wait_for_flock(file: IO[str], run_dir: Path) -> bool:
    """Take `flock` on a run's lock file. Waits a short time for another holder, and raises FolderInUseError after it.

    Returns whether the lock was taken. On a file system without locks it was not, and a warning says so.
    """
    deadline = time.monotonic() + WAIT_S
    has_announced = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            file.seek(0)
            problem = f"run={run_dir} is in use by {file.read() or 'another run'}"
        except OSError as error:  # ENOSYS, ENOLCK: Lustre without the mount option flock, some NFS
            log.warning(
                "run=%s: its file system has no locks (%s); make sure that no second run writes there",
                run_dir, error.strerror,
            )  # fmt: skip
            return False
        if time.monotonic() > deadline:
            raise FolderInUseError(f"{problem}; stop that run, or choose another run=NAME")
        if not has_announced:
            log.warning("%s; waiting up to %.0f s for its end", problem, WAIT_S)
            has_announced = True
        time.sleep(0.2)
