"""What the jobs of a sweep by Hydra's plugins know of each other: files in the sweep's folder."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# The folder of a sweep's jobs, inside the sweep's folder.
JOBS = ".jobs"
# The file beside the jobs' files which exists while a signal ends the sweep.
STOPPING = "stopping"


@dataclass(frozen=True)
class JobFolder:
    """One file for each job, with the name of its run.

    The lock of the file: held while the job trains its run.
    The text of the file: why the run has failed; empty if it has not.
    """

    # The sweep's folder.
    sweep: Path

    @property
    def path(self) -> Path:
        return self.sweep / JOBS

    def begin(self) -> None:
        """Make the folder, and forget what failed in an earlier sweep and that a signal ended it."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (STOPPING, *self.failed()):
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Wait for the lock of the run's file, and hold it. Forgets why the run has failed before.

        So a job with equal values waits here until the first one has ended, and finds its run complete.
        """
        with (self.path / name).open("a") as file:
            with suppress(OSError):  # without locks there is still the run's own, which says so
                fcntl.flock(file, fcntl.LOCK_EX)
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
