"""What shards are named by, how they may be reached, and what is counted on the way without costing a sample."""

import hashlib
import importlib.util
import os
import re
import subprocess
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
    """Seconds; a server silent for so long is asked again."""


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


class Watch:
    """What one reader counts, and whom it answers while it waits."""

    def __init__(
        self,
        access: Access = DIRECT,
        tally: Counter[str] | None = None,
        tick: Callable[[], None] = lambda: None,
        late: deque[str] | None = None,
    ) -> None:
        """`tally` counts retries and the like, by names that begin with SEEN; `tick` is called while waiting; `late` holds what is
        still to be counted, by whichever of those who share it settles."""
        self.access, self.tick = access, tick
        self.tally: Counter[str] = Counter() if tally is None else tally
        self.late: deque[str] = deque() if late is None else late

    def see(self, event: str) -> None:
        """Count an event that costs no sample."""
        self.tally[SEEN + event] += 1

    def see_later(self, event: str) -> None:
        """The same, from any thread; counted by `settle`."""
        self.late.append(event)

    def settle(self) -> None:
        """Count what other threads have seen."""
        while self.late:
            self.see(self.late.popleft())

    def near_end(self) -> None:
        """The end of what is being read is near."""


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


def digest(text: str) -> str:
    """Sixteen hexadecimal digits for any text, a path that is no UTF-8 included."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def own_cache() -> Path:
    """The user's cache folder (XDG_CACHE_HOME is honoured)."""
    return Path(platformdirs.user_cache_dir("clipscale", appauthor=False))


def leaf_of(url: str) -> str:
    """The last part of a path or address."""
    return url.split("?", 1)[0].rsplit("/", 1)[-1] if not is_local(url) else os.path.basename(url)  # noqa: PTH119
