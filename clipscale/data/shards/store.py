"""Opens shards wherever they are: local files, the output of commands, remote objects, and local copies of these."""

import logging
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from clipscale.common import files
from clipscale.data.shards.access import (
    DIRECT,
    EVENT,
    Access,
    SourceError,
    digest,
    is_local,
    leaf_of,
    scheme_of,
    unsigned,
)
from clipscale.data.shards.remote import LARGEST_BLOCK, RemoteFile, Retries, State

log = logging.getLogger(__name__)

BUFFER = 1 << 17
"""Bytes that are read of a local file or a command's output at once."""


class Opened(NamedTuple):
    """A shard's stream, which the caller closes, and the size and version of its content (None, "": unknown)."""

    stream: Any
    size: int | None
    version: str


class Store:
    """Opens shards for one reader."""

    def __init__(
        self, access: Access = DIRECT, counts: Counter[str] | None = None, tick: Callable[[], None] = lambda: None
    ) -> None:
        """`counts` receives faults that cost no sample. `tick` is called during waits and may raise to end them."""
        self.access, self.counts, self.tick = access, Counter() if counts is None else counts, tick
        self._retries = Retries(self._count, tick)

    def open(self, url: str) -> Opened:
        """The shard's bytes, seekable except for `pipe:`, whose command runs only if the access allows it.

        Raises OSError for a local file, SourceError (`unreachable_shard`, `missing_shard`, ...) for a remote one.
        """
        if is_local(url):
            return _opened(Path(url), *self.state(url))
        if scheme_of(url) == "pipe":
            if not self.access.pipes:
                raise SourceError("refused_pipe", "`pipe:` runs a shell command, which is not allowed")
            return Opened(Pipe(url[len("pipe:") :]), None, "")
        if self.access.cache and self.access.cache_bytes != 0 and (copy := self._copy_of(url)):
            return copy
        remote = RemoteFile(url, self._retries)
        return Opened(remote, remote.size, remote.version)

    def state(self, url: str) -> State:
        """Size and version of a shard now. Raises OSError or SourceError."""
        if is_local(url):
            about = Path(url).stat()
            return about.st_size, str(about.st_mtime_ns)
        return self._retries.fetch(url, 0, 1)[1]

    def _count(self, event: str) -> None:
        self.counts[EVENT + event] += 1

    def _copy_of(self, url: str) -> Opened | None:
        """The shard's copy in the cache, made now if there is none; None if it does not fit there.

        Copies are named by address and version. While the server is away, the copy used last stands in.
        """
        folder, name = Path(self.access.cache or "").expanduser() / "shards", digest(unsigned(url))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            size, version = self.state(url)
        except SourceError as error:
            copies = sorted(folder.glob(f"{name}-*"), key=os.path.getmtime)
            if error.reason != "unreachable_shard" or not copies:
                raise
            self._count("copy_of_unreachable")
            return _opened(copies[-1])
        path = folder / f"{name}-{digest(f'{size} {version}')}-{leaf_of(url)[-80:]}"
        try:
            if not path.exists():
                if not _make_room(folder, size, self.access.cache_bytes):
                    raise OSError("it is larger than data.cache_bytes")
                with files.replacing(path) as out, closing(RemoteFile(url, self._retries)) as remote:
                    while data := remote.read(LARGEST_BLOCK):
                        out.write(data)
                        self.tick()
            os.utime(path)
            return _opened(path, size, version)
        except OSError as error:  # a full disk, or another process has removed the copy: the object itself is read
            log.warning("data.cache=%s: no copy of %s (%s)", self.access.cache, leaf_of(url), error)
            self._count("no_room_for_copy")
            return None


def _opened(path: Path, size: int | None = None, version: str = "") -> Opened:
    return Opened(path.open("rb", BUFFER), size, version)


def _make_room(folder: Path, size: int, bound: int | None) -> bool:
    """Remove the copies used longest ago until one of `size` bytes fits the bound. Their readers can go on reading."""
    if bound is None or size > bound:
        return bound is None
    copies = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # other processes remove copies, too
            about = path.stat()
            copies.append((about.st_mtime, about.st_size, path))
    total = size + sum(length for _, length, _ in copies)
    for _, length, path in sorted(copies):
        if total > bound:
            path.unlink(missing_ok=True)
            total -= length
    return True


class Pipe:
    """The output of a shell command. Closing it early ends the command."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(command, BUFFER, shell=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        self._out: Any = self._process.stdout
        self._at = 0

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self._at

    def peek(self, size: int) -> bytes:
        """Some of the next bytes, which stay to be read."""
        return bytes(self._out.peek(size))

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes. Raises SourceError if the command fails."""
        data: bytes = self._out.read(size)
        self._at += len(data)
        if (len(data) < size or size < 0) and (status := self._process.wait()):
            raise SourceError("failed_pipe", f"the command ended with status {status}")
        return data

    def close(self) -> None:
        """End the command."""
        self._out.close()
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
