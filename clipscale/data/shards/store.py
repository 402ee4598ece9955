"""Opens shards wherever they are: local files, the output of commands, remote objects."""

import io
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

from clipscale.config.data import DataConfig
from clipscale.data.shards.addresses import EVENT, SourceError, is_local, scheme_of
from clipscale.data.shards.remote import TICK_S, RemoteFile, State, fetch

BUFFER = 1 << 17
"""Bytes that are read of a shard at once."""


class Store:
    """Opens shards for one reader."""

    def __init__(
        self,
        config: DataConfig | None = None,
        counts: Counter[str] | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """`config` says whether commands may run (None: no). `counts` receives faults that cost no sample. `tick` is
        called during waits and may raise to end them.
        """
        self.config = config or DataConfig()
        self.tick = tick
        self.counts = Counter() if counts is None else counts

    def open(self, url: str) -> tuple[Any, State]:
        """The shard's bytes, which the caller closes, and its state (for `pipe:` nothing).

        They are seekable except for `pipe:`, whose command runs only if the settings allow it.

        Raises OSError for a local file, SourceError (`unreachable_shard`, `missing_shard`, ...) for a remote one.
        """
        if is_local(url):
            return Path(url).open("rb", BUFFER), self.state(url)
        if scheme_of(url) == "pipe":
            if not self.config.allow_pipe:
                raise SourceError("refused_pipe", "`pipe:` runs a shell command, which is not allowed")
            return io.BufferedReader(Pipe(url[len("pipe:") :], self), BUFFER), (0, "")
        remote = RemoteFile(url, self)
        return io.BufferedReader(remote, BUFFER), remote.state

    def state(self, url: str) -> State:
        """Size and version of a shard now. Raises OSError or SourceError."""
        if is_local(url):
            return local_state(url)
        return fetch(self, url, 0, 1)[1]

    def count(self, event: str) -> None:
        self.counts[EVENT + event] += 1


def local_state(path: str) -> State:
    """The state of a file. Raises OSError."""
    status = os.stat(path)  # noqa: PTH116 (for each of very many)
    return status.st_size, str(status.st_mtime_ns)


class Pipe(io.RawIOBase):
    """The output of a shell command, for a reader. Closing it early ends the command and those that it has started."""

    def __init__(self, command: str, store: Store) -> None:
        self._store = store
        self._given = 0
        self._process = subprocess.Popen(
            command, 0, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, process_group=0
        )

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises SourceError if the command fails, or gives nothing for `data.timeout_s`."""
        output = cast(io.FileIO, self._process.stdout)
        limit = self._store.config.timeout_s
        until = time.monotonic() + limit
        while not wait([output.fileno()], TICK_S):
            self._store.tick()
            if time.monotonic() > until:
                raise SourceError("stalled_pipe", f"the command has given nothing for data.timeout_s={limit:g}")
        count = output.readinto(buffer)
        if not count and (status := self._process.wait()):
            raise SourceError("failed_pipe", f"the command ended with status {status}")
        self._given += count or 0
        return count or 0

    def tell(self) -> int:
        return self._given

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        cast(io.FileIO, self._process.stdout).close()
        super().close()
