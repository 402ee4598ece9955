"""Opening a shard wherever it lies: this machine's files, a command's output, and remote objects with or without a local copy.

Everything that reads shards goes through a `Store`.
"""

import os
import threading
from collections import Counter, deque
from collections.abc import Callable

from clipscale.data.shards.access import DIRECT, Access, Opened, Pipe, Watch, is_local, scheme_of
from clipscale.data.shards.cache import Copies
from clipscale.data.shards.origins import is_concurrent, origin_of
from clipscale.data.shards.remote import RemoteFile


class Store(Watch):
    """Opens shards for one reader."""

    def __init__(
        self,
        access: Access = DIRECT,
        tally: Counter[str] | None = None,
        tick: Callable[[], None] = lambda: None,
        late: deque[str] | None = None,
    ) -> None:
        super().__init__(access, tally, tick, late)
        self._expected: str | None = None
        self._opening: _Opening | None = None

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
        if is_concurrent(url):
            self._opening = _Opening(url, self)


class _GivenUpError(Exception):
    """Raised in a thread whose result nobody wants any more."""


class _Aside(Store):
    """A store in a thread of its own: all that it sees is counted by the one whose `late` it shares."""

    def see(self, event: str) -> None:
        self.see_later(event)

    def settle(self) -> None:
        """Left to the other."""


class _Opening:
    """A shard that is opened by a thread."""

    def __init__(self, url: str, store: Store) -> None:
        self.url = url
        self._store = _Aside(store.access, tick=self._still_wanted, late=store.late)
        self._opened: Opened | None = None
        self._error: Exception | None = None
        self._over, self._wanted = threading.Event(), True
        threading.Thread(target=self._run, name="open-ahead", daemon=True).start()

    def _still_wanted(self) -> None:
        if not self._wanted:
            raise _GivenUpError

    def _run(self) -> None:
        try:
            self._opened = self._store.open(self.url)
            if isinstance(self._opened.stream, RemoteFile):
                self._opened.stream.look_ahead()
        except Exception as error:  # raised where the shard is taken
            self._error = error
        finally:
            self._over.set()
            if not self._wanted:
                self._close()

    def _close(self) -> None:
        """Perhaps twice, by the thread and by whoever gives up."""
        if self._opened is not None:
            self._opened.stream.close()

    def take(self, store: Store) -> Opened:
        """Wait for it; from now on it is the store's. Raises what its opening raised."""
        try:
            while not self._over.wait(0.1):
                store.tick()
        except BaseException:  # whoever waited gives up
            self.give_up()
            raise
        store.settle()
        if self._error is not None:
            raise self._error
        assert self._opened is not None
        if isinstance(self._opened.stream, RemoteFile):
            self._opened.stream.watch = store
        return self._opened

    def give_up(self) -> None:
        """Nobody will read it."""
        self._wanted = False
        if self._over.is_set():
            self._close()
