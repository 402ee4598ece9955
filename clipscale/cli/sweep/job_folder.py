"""Files in a sweep's folder by which jobs of Hydra's launchers learn of each other."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clipscale.common import files

# The folder of a sweep's jobs, inside the sweep's folder.
JOBS = ".jobs"
# The file beside the jobs' files which exists while a signal ends the sweep.
STOPPING = "stopping"


@dataclass(frozen=True)
class JobFolder:
    """One file for each job, with the name of its run.

    The job holds the file's lock while it trains its run. The file's text says why the run has failed; it is empty if
    the run has not.
    """

    # The sweep's folder.
    sweep: Path

    @property
    def path(self) -> Path:
        return self.sweep / JOBS

    def begin(self) -> None:
        """Make the folder, and forget an earlier sweep: which runs failed, and that a signal ended it."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (STOPPING, *self.failed()):
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Wait for the lock of the run's file, and hold it. Forgets why the run has failed before.

        So a second job with equal values waits here until the first one has ended, and finds the run complete.
        """
        with files.locked(self.path / name) as file:  # where a file system has no locks, RunLock tells the user
            file.truncate(0)
            yield

    def note_failure(self, name: str, reason: str) -> None:
        """Write why a run has failed."""
        (self.path / name).write_text(reason)

    def failed(self) -> list[str]:
        """The names of the runs that have failed."""
        return sorted(file.name for file in self.path.iterdir() if file.read_text())

    @property
    def is_stopping(self) -> bool:
        """Whether a signal ends the sweep: no further job starts."""
        return (self.path / STOPPING).exists()

    def stop(self) -> None:
        """Let no further job start."""
        (self.path / STOPPING).touch()

    def wait_for_jobs(self) -> None:
        """Wait until the jobs that have begun have ended."""
        for path in self.path.iterdir():
            with path.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
