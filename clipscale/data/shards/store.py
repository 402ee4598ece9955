"""Opens shards wherever they are: local files, output of commands, and remote objects with or without a local copy.

All reading of shards goes through a `Store`, which also prefetches the next shard.
"""

import os
import subprocess
from collections.abc import Callable
from concurrent.futures import CancelledError

from clipscale.common import files
from clipscale.data.shards.access import Opened, ReadContext, SourceError, is_local, scheme_of
from clipscale.data.shards.cache import ShardCache
from clipscale.data.shards.remote import RemoteFile
from clipscale.data.shards.remote_object import in_thread, is_concurrent, remote_object, result


class Store(ReadContext):
    """Opens shards for one reader."""

    _expected: str | None = None
    _prefetch: "_Prefetch | None" = None

    def open(self, url: str) -> Opened:
        """The shard's bytes, seekable except for `pipe:`, whose command runs only if the access allows it.

        Raises OSError for a local file, SourceError (`unreachable_shard`, `missing_shard`, ...) for a remote one.
        """
        if is_local(url):
            file = files.opened(url, buffering=1 << 17)
            about = os.fstat(file.fileno())
            return Opened(file, about.st_size, str(about.st_mtime_ns))
        if scheme_of(url) == "pipe":
            if not self.access.pipes:
                raise SourceError("refused_pipe", f"{url}: `pipe:` runs a shell command, which is not allowed")
            return Opened(Pipe(url[len("pipe:") :]), None, "")
        self.collect()
        if self._prefetch is not None and self._prefetch.url == url:
            prefetch, self._prefetch = self._prefetch, None
            try:
                opened = prefetch.take(self.tick)
            finally:
                self.collect()
            if isinstance(opened.stream, RemoteFile):
                opened.stream.context = self
        else:
            opened = self._open_remote(url, self)
        if self._copies:
            self.near_end()
        return opened

    def _open_remote(self, url: str, context: ReadContext) -> Opened:
        if self._copies:
            return ShardCache(context).open(url)
        remote = RemoteFile(remote_object(url, self.access.wait_s), context)
        return Opened(remote, remote.length, remote.version)

    @property
    def _copies(self) -> bool:
        return self.access.cache is not None and self.access.cache_bytes != 0

    def expect(self, url: str | None) -> None:
        """Set the shard to prefetch, the one that is opened after the next or present one (None: no other).

        A remote shard is prefetched once the present one is open if copies are made, else near the present one's end,
        so that its version is still new when it is read.
        """
        self._expected = url
        if url is None and self._prefetch is not None:
            self._prefetch.drop()
            self._prefetch = None
            self.collect()

    def near_end(self) -> None:
        """Prefetch the expected shard."""
        if self._expected is None or self._prefetch is not None:
            return
        url, self._expected = self._expected, None
        if scheme_of(url) not in ("", "pipe", "table") and is_concurrent(url):
            self._prefetch = _Prefetch(url, self._open_ahead)

    def _open_ahead(self, url: str, check: Callable[[], None]) -> Opened:
        """Open a shard and prefetch its first block, in a thread."""
        opened = self._open_remote(url, _ThreadContext(self.access, tick=check, pending=self.pending))
        if isinstance(opened.stream, RemoteFile):
            opened.stream.prefetch()
        return opened


class _ThreadContext(ReadContext):
    """The context of a thread, whose events the store counts that shares `pending`."""

    def count(self, event: str) -> None:
        self.count_later(event)


class _Prefetch:
    """A shard that a thread opens before its reader needs it."""

    def __init__(self, url: str, open_shard: Callable[[str, Callable[[], None]], Opened]) -> None:
        """`open_shard` gets the address, and a function that raises CancelledError after a drop."""
        self.url, self._wanted = url, True
        self._opened = in_thread(lambda: open_shard(url, self._check), "prefetch-shard")

    def _check(self) -> None:
        if not self._wanted:
            raise CancelledError

    def take(self, tick: Callable[[], None]) -> Opened:
        """Wait for the shard; it is the caller's. Raises what opening it or `tick` raised."""
        try:
            return result(self._opened, tick)
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Close the shard, now or when it is open."""
        self._wanted = False
        self._opened.add_done_callback(lambda opened: opened.exception() or opened.result().stream.close())


class Pipe:
    """The output of a shell command. Closing it early ends the command."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes. Raises SourceError if the command fails."""
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size or size < 0:
            status = self._process.wait()
            if status:
                raise SourceError("failed_pipe", f"the command ended with status {status}")
        return data

    def close(self) -> None:
        """End the command."""
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
