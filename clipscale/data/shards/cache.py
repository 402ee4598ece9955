"""Local copies of remote shards, shared by all processes of a machine; the least recently used go, to keep a bound.

A copy is written under another name and renamed when it is complete. Locks are flock's, so they end with their process.
"""

import errno
import fcntl
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from clipscale.common import files
from clipscale.data.shards import index
from clipscale.data.shards.access import Opened, ReadContext, SourceError, digest, leaf_of, unsigned
from clipscale.data.shards.remote import LARGEST_BLOCK, RemoteFile
from clipscale.data.shards.remote_object import remote_object

log = logging.getLogger(__name__)

_PART = ".part"


class ShardCache:
    """The copies in the cache folder, for one reader."""

    def __init__(self, context: ReadContext) -> None:
        self._context, self._bound = context, context.access.cache_bytes
        self._folder = Path(str(context.access.cache)).expanduser() / "shards"

    def open(self, url: str) -> Opened:
        """The shard's copy, made now if there is none, or the remote object if no copy fits. Raises SourceError."""
        files.inner_folder(self._folder.parent, self._folder.name)
        try:
            remote = RemoteFile(remote_object(url, self._context.access.wait_s), self._context)
        except SourceError as error:
            if error.reason == "unreachable_shard" and (copy := self._last_used(url)):
                self._context.count("copy_of_unreachable")
                return Opened(copy, None, "")
            raise
        state = digest(f"{remote.length} {remote.version}")
        path = self._folder / f"{digest(unsigned(url))}-{state}-{leaf_of(url)[-80:]}"
        try:
            while True:
                with suppress(FileNotFoundError):  # not there yet, or evicted between these two lines
                    copy = _copy(path)
                    os.utime(copy.fileno())
                    return Opened(copy, remote.length, remote.version)
                if not self._make(url, path, remote):
                    remote.seek(0)
                    return Opened(remote, remote.length, remote.version)
        except BaseException:
            remote.close()  # and its prefetch
            raise

    def _last_used(self, url: str) -> IO[bytes] | None:
        """Of the copies of this shard's versions, the one opened last: the newest version that any process has seen."""
        own = digest(unsigned(url)) + "-"
        for _, _, path in sorted((found for found in self._files() if found[2].name.startswith(own)), reverse=True):
            with suppress(FileNotFoundError):  # evicted meanwhile
                return _copy(path)
        return None

    def _make(self, url: str, path: Path, remote: RemoteFile) -> bool:
        """Write the copy, or wait while another process does. False if it does not fit.

        Raises SourceError `wrong_checksum` if the index has another checksum for this version.
        """
        part, context = path.with_name("." + path.name + _PART), self._context
        with _own(part) as out:
            _lock(out, context.tick)
            if path.exists() or not _is_at(out, part):
                return True  # another process has finished, or failed and left
            try:
                if not self._reserve(part, out, remote.length):
                    part.unlink()
                    context.count("no_room_for_copy")
                    return False
                remote.seek(0)
                checksum = hashlib.sha256()
                while data := remote.read(LARGEST_BLOCK):
                    out.write(data)
                    checksum.update(data)
                    context.tick()
                out.flush()
                os.fsync(out.fileno())
                entries = index.known([url], context.access.cache).get(url, [])
                entry = index.matching(entries, (remote.length, remote.version))
                if entry is not None and entry.sha256 not in (None, checksum.hexdigest()):
                    raise SourceError("wrong_checksum", "what came is not what was indexed")
                part.rename(path)
                return True
            except BaseException as error:
                part.unlink(missing_ok=True)
                if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                log.warning("data.cache=%s: %s; going on without a copy", self._folder.parent, error.strerror)
                context.count("no_room_for_copy")
                return False

    def _reserve(self, part: Path, out: IO[bytes], size: int) -> bool:
        """Delete old copies until this one fits, and give it its final length, which other processes count."""
        with files.open_lock(self._folder / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._bound is not None:
                others = [found for found in self._files() if found[2] != part]
                others = [(used, n, path) for used, n, path in others if path.suffix != _PART or not _orphan(path)]
                total = size + sum(length for _, length, _ in others)
                for _, length, path in sorted(others):
                    if total > self._bound and path.suffix != _PART:
                        path.unlink(missing_ok=True)  # an open file can still be read
                        total -= length
                if total > self._bound:
                    return False
            out.truncate(0)
            out.truncate(size)
            return True

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """When each was last used, its bytes, and its path."""
        for path in self._folder.iterdir():
            if path.name != ".lock":
                with suppress(FileNotFoundError):
                    about = path.lstat()
                    if stat.S_ISREG(about.st_mode):
                        yield about.st_mtime_ns, about.st_size, path


def _copy(path: Path) -> IO[bytes]:
    """A copy, open for reading. What is no regular file was not made here, and is removed. Raises FileNotFoundError."""
    try:
        return files.opened(path, follow=False, buffering=1 << 17)
    except FileNotFoundError:
        raise
    except OSError:
        path.unlink(missing_ok=True)
        raise FileNotFoundError(str(path)) from None


def _own(part: Path) -> IO[bytes]:
    """The file of an incomplete copy. What else has its name, such as a link, is removed."""
    try:
        return files.open_lock(part)
    except OSError:
        part.unlink()
        return files.open_lock(part)


def _lock(file: IO[bytes], tick: Callable[[], None]) -> None:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            tick()
            time.sleep(0.1)


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether the path leads to this open file."""
    try:
        return os.fstat(file.fileno()).st_ino == path.lstat().st_ino
    except FileNotFoundError:
        return False


def _orphan(part: Path) -> bool:
    """Delete an incomplete copy whose process has ended; whether it is gone."""
    try:
        file = files.opened(part, follow=False)
    except FileNotFoundError:
        return True
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        part.unlink(missing_ok=True)
        return True
