"""Addresses of shards, and what the readers of shards share: settings, errors and event counters.

Imports no reader, so every other module of this folder may import it.
"""

import hashlib
import os
import re
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs

EVENT = "event:"
"""Prefix of the counters of events that cost no sample, such as repeated requests."""
_SIGNATURE = re.compile(
    r"x-(amz|goog|oss|cos|obs)-.*|(aws|google|oss)?access(key)?id|signature|expires|key-pair-id|policy|(security-|access_)?token"
    r"|s(ig|e|p|v|r|t|ip|pr|koid|ktid|kt|ke|ks|kv|aoid|uoid|cid)|auth|api_?key",
    re.IGNORECASE,
)
"""Parameters of presigned addresses of S3, Google, Azure, Alibaba, Tencent, Huawei and CloudFront."""
_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]+:", re.IGNORECASE)


class SourceError(Exception):
    """A shard cannot be read further. `reason` is a short fixed word under which the lost samples are counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, str(self))


@dataclass(frozen=True)
class Access:
    """How to reach remote shards, and where to keep local copies."""

    cache: str | None = None
    """Folder for copies of remote shards; None: read them where they are."""
    cache_bytes: int | None = None
    """Bound on the copies' bytes; None: the disk's size."""
    retries: int = 8
    """Consecutive requests that may fail without gaining a byte before the shard is given up."""
    wait_s: float = 30.0
    """Seconds of a server's silence after which the request is repeated."""
    pipes: bool = False
    """Whether `pipe:` addresses may run their command (data.allow_pipe)."""
    root: str | None = None
    """What tables may name files in (data.table.root); None: their own folder or server."""


DIRECT = Access()
"""Remote shards are read where they are."""


class Opened(NamedTuple):
    """A shard's stream, which the caller closes, and the size and version of its content (None, "": unknown)."""

    stream: Any
    size: int | None
    version: str


@dataclass(eq=False)
class ReadContext:
    """The settings of one reader, its event counters, and the callback it makes while it waits."""

    access: Access = DIRECT
    counts: Counter[str] = field(default_factory=Counter)
    tick: Callable[[], None] = lambda: None
    """May raise to end a wait."""
    pending: deque[str] = field(default_factory=deque)
    """The events of other threads."""

    def count(self, event: str) -> None:
        """Count an event; for the reader's own thread."""
        self.counts[EVENT + event] += 1

    def count_later(self, event: str) -> None:
        """Queue an event for `collect`; for any thread, without a lock."""
        self.pending.append(event)

    def collect(self) -> None:
        """Count the queued events."""
        while self.pending:
            self.count(self.pending.popleft())

    def near_end(self) -> None:
        """Called when a file is about to be read to its end."""


def is_text(name: str) -> bool:
    """Whether a name is Unicode, as an index can hold it. Linux allows any bytes, which Python turns into lone surrogates."""
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def is_local(url: str) -> bool:
    """Whether the address is a path on this machine rather than a URL."""
    return not _SCHEME.match(url)


def as_path(name: str) -> str:
    """A file's name in a form that no reader takes for an address, such as `./pipe:x.tar`."""
    return name if is_local(name) else f"./{name}"


def scheme_of(url: str) -> str:
    """The scheme in lower case, empty for a path."""
    return "" if is_local(url) else url.split(":", 1)[0].lower()


def unsigned(url: str) -> str:
    """The address without the parameters that grant access to it: an address that is signed anew names the same shard."""
    if "?" not in url or is_local(url):
        return url
    base, _, query = url.partition("?")
    kept = [part for part in query.split("&") if not _SIGNATURE.fullmatch(part.partition("=")[0])]
    return base + "?" * bool(kept) + "&".join(kept)


def leaf_of(url: str) -> str:
    """The last part of a path or address."""
    return url.split("?", 1)[0].rsplit("/", 1)[-1] if not is_local(url) else os.path.basename(url)  # noqa: PTH119


def hash64(data: str | bytes) -> int:
    """A 64-bit hash of bytes or of any text, a path that is no UTF-8 included."""
    encoded = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def digest(text: str) -> str:
    """The hash of a text as sixteen hexadecimal digits."""
    return hash64(text).to_bytes(8, "little").hex()


def user_cache() -> Path:
    """The user's cache folder (XDG_CACHE_HOME is honoured)."""
    return Path(platformdirs.user_cache_dir("clipscale", appauthor=False))
