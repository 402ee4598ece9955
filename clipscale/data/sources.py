"""Opening a shard wherever it lies: this machine's files, a command's output, and remote objects with or without a local copy.

Everything that reads shards goes through a `Store`, which also counts what went wrong on the way without costing a sample.
"""

import importlib.util
import os
import re
import subprocess
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs

from clipscale.errors import UserError

SEEN = "seen:"
"""What a tally's names begin with where they count events that cost no sample, such as a request made twice."""
_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]+:", re.IGNORECASE)
EXTRAS = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gs"), "gcs": ("gcsfs", "gs")}
"""Scheme -> the package that reads it, and the extra of ours that installs it. The others come with what is always installed."""


class SourceError(Exception):
    """A shard that cannot be read on. `reason` is one of a small set of words, by which its samples are counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, str(self))


@dataclass(frozen=True)
class Access:
    """How remote shards are reached, and where copies are kept."""

    cache: str | None = None
    """Folder for copies of remote shards; None: they are read where they are."""
    cache_bytes: int | None = None
    """The copies' bound; None: the disk's."""
    retries: int = 8
    """Requests in a row that may fail without a byte gained before a shard is given up."""
    wait_s: float = 30.0
    """A server silent for so long is asked again."""


DIRECT = Access()
"""Remote shards are read where they are."""


class Opened(NamedTuple):
    """A shard's byte stream, to be closed by the caller, and what tells this state of it from any other (None: unknown)."""

    stream: Any
    size: int | None
    stamp: str


def is_local(url: str) -> bool:
    """Whether the address is a path on this machine rather than a URL."""
    return not _SCHEME.match(url)


def scheme_of(url: str) -> str:
    """The scheme in lower case, empty for a path."""
    return "" if is_local(url) else url.split(":", 1)[0].lower()


def require(url: str, setting: str) -> None:
    """Raise UserError, naming what to install, unless addresses like this one can be read here."""
    scheme = scheme_of(url)
    if scheme in ("", "pipe", "table", "http", "https"):
        return
    package, extra = EXTRAS.get(scheme, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise UserError(
            f"{setting}={url!r}: {scheme}: addresses need the package {package}; pip install 'clipscale[{extra}]'"
        )
    from fsspec import available_protocols, get_filesystem_class

    if scheme not in available_protocols():
        raise UserError(
            f"{setting}={url!r}: no reader for {scheme}: addresses; there are https:, s3:, gs:, hf: and local paths"
        )
    try:
        get_filesystem_class(scheme)
    except ImportError as error:
        raise UserError(f"{setting}={url!r}: {error}") from error


class Store:
    """Opens shards for one reader."""

    def __init__(
        self, access: Access = DIRECT, tally: Counter[str] | None = None, tick: Callable[[], None] = lambda: None
    ) -> None:
        """`tally` counts retries and the like, by names that begin with SEEN; `tick` is called while waiting."""
        self.access, self.tick = access, tick
        self.tally: Counter[str] = Counter() if tally is None else tally
        self._expected: str | None = None
        self._opening: _Opening | None = None
        self._late: deque[str] = deque()

    def see(self, event: str) -> None:
        """Count an event that costs no sample."""
        self.tally[SEEN + event] += 1

    def see_later(self, event: str) -> None:
        """The same, from any thread; counted by `settle`."""
        self._late.append(event)

    def settle(self) -> None:
        """Count what other threads have seen."""
        while self._late:
            self.see(self._late.popleft())

    def open(self, url: str) -> Opened:
        """The shard's bytes, seekable but for `pipe:`.

        Raises OSError for a local file, SourceError (`unreachable_shard`, `missing_shard`, ...) for a remote one.
        """
        if is_local(url):
            file = open(url, "rb", buffering=1 << 17)  # noqa: PTH123, SIM115 (a path as it was given; the caller closes)
            about = os.fstat(file.fileno())
            return Opened(file, about.st_size, str(about.st_mtime_ns))
        if scheme_of(url) == "pipe":
            return Opened(Pipe(url.removeprefix("pipe:")), None, "")
        self.settle()
        if self._opening is not None and self._opening.url == url:
            opening, self._opening = self._opening, None
            opened = opening.take(self)
        else:
            opened = self._open_remote(url)
        if self._copies:
            self.near_end()
        return opened

    def _open_remote(self, url: str) -> Opened:
        from clipscale.data.copies import Copies
        from clipscale.data.origins import origin_of
        from clipscale.data.remote import RemoteFile

        if self._copies:
            return Copies(str(self.access.cache), self.access.cache_bytes).open(url, self)
        remote = RemoteFile(origin_of(url, self.access.wait_s), self)
        return Opened(remote, remote.length, remote.version)

    @property
    def _copies(self) -> bool:
        return self.access.cache is not None and self.access.cache_bytes != 0

    def expect(self, url: str | None) -> None:
        """Say which shard will be opened after the next or present one (None: no other).

        A thread opens it beforehand if it is remote: when the present one is open where copies are made, else when the present one's end is
        near, so that what it learns is young when it is read.
        """
        self._expected = url
        if url is None and self._opening is not None:
            self._opening.give_up()
            self._opening = None
            self.settle()

    def near_end(self) -> None:
        """Begin to open what is expected."""
        if self._expected is None or self._opening is not None:
            return
        url, self._expected = self._expected, None
        if scheme_of(url) in ("", "pipe", "table"):
            return
        from clipscale.data.origins import is_concurrent

        if is_concurrent(url):
            self._opening = _Opening(url, self)


class _GivenUpError(Exception):
    """Raised in a thread whose result nobody wants any more."""


class _Opening:
    """A shard that is opened by a thread."""

    def __init__(self, url: str, store: Store) -> None:
        self.url = url
        self._store = Store(store.access, tick=self._still_wanted)
        self._store.see = store.see_later  # type: ignore[method-assign]
        self._opened: Opened | None = None
        self._error: Exception | None = None
        self._over, self._wanted, self._lock = threading.Event(), True, threading.Lock()
        threading.Thread(target=self._run, name="open-ahead", daemon=True).start()

    def _still_wanted(self) -> None:
        if not self._wanted:
            raise _GivenUpError

    def _run(self) -> None:
        from clipscale.data.remote import RemoteFile

        try:
            self._opened = self._store.open(self.url)
            if isinstance(self._opened.stream, RemoteFile):
                self._opened.stream.look_ahead()
        except Exception as error:  # raised where the shard is taken
            self._error = error
        with self._lock:
            self._over.set()
            if not self._wanted:
                self._close()

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.stream.close()

    def take(self, store: Store) -> Opened:
        """Wait for it; from now on it is the store's. Raises what its opening raised."""
        from clipscale.data.remote import RemoteFile

        while not self._over.wait(0.1):
            store.tick()
        store.settle()
        if self._error is not None:
            raise self._error
        assert self._opened is not None
        if isinstance(self._opened.stream, RemoteFile):
            self._opened.stream.store = store
        return self._opened

    def give_up(self) -> None:
        """Nobody will read it."""
        with self._lock:
            self._wanted = False
            if self._over.is_set():
                self._close()


class Pipe:
    """What a shell command prints. Closing it early ends the command."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes. Raises SourceError where the command fails."""
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


def own_cache() -> Path:
    """The user's cache folder (XDG_CACHE_HOME is honoured)."""
    return Path(platformdirs.user_cache_dir("clipscale", appauthor=False))


def leaf_of(url: str) -> str:
    """The last part of a path or address."""
    return url.split("?", 1)[0].rsplit("/", 1)[-1] if not is_local(url) else os.path.basename(url)  # noqa: PTH119
