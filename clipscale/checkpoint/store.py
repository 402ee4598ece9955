"""Copies of a run's checkpoints in object storage (`checkpoint.store`), sent in the background and fetched where a folder lacks them."""

import logging
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import fsspec

from clipscale.checkpoint import folder
from clipscale.checkpoint.loading import verify
from clipscale.checkpoint.manifest import NAME, Manifest
from clipscale.common.errors import UserError, first_line
from clipscale.common.files import inner_folder, sync_folder
from clipscale.common.units import format_bytes
from clipscale.config.redact import redact
from clipscale.distributed.world import World

log = logging.getLogger(__name__)

STEP = re.compile(r"step_(\d{8,})")


class Store:
    """The folder ADDRESS/NAME of a run called NAME, at any address that fsspec knows. Rank 0 has it.

    A checkpoint's manifest is sent last, so a copy without one is not complete. Of several that wait only the newest is sent.
    """

    def __init__(self, address: str, run: Path) -> None:
        """Raises UserError for an address that cannot be used."""
        self.run, self.shown = run, redact(address)
        self.sending: Path | None = None
        """The checkpoint that is being sent, which must not be deleted."""
        self._next: tuple[Path, int, int] | None = None
        self._threads = ThreadPoolExecutor(1, "clipscale-store")
        self._work: Future[None] | None = None
        try:
            self._fs, root = fsspec.url_to_fs(address)
            self._root = f"{root.rstrip('/')}/{run.name}"
            if "file" in self._fs.protocol:
                self._fs.makedirs(self._root, exist_ok=True)  # elsewhere it might make a bucket
            self._fs.pipe_file(f"{self._root}/.writable", b"")
            self._fs.rm_file(f"{self._root}/.writable")
        except Exception as error:  # each file system has errors of its own
            raise UserError(
                f"checkpoint.store={self.shown}: it cannot be used ({reason(error)}); for s3:// and gs:// install clipscale[s3] or [gs], "
                "and set credentials"
            ) from error

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints there, oldest first."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._root)
        except FileNotFoundError:
            return []
        names = (name.rstrip("/").split("/")[-2:] for name in found)
        return sorted(int(match[1]) for step, file in names if file == NAME and (match := STEP.fullmatch(step)))

    def send(self, checkpoint: Path, keep: int, keep_every: int) -> None:
        """Begin to copy a complete checkpoint there, and delete outdated ones, when the copy before is complete. A failure is reported."""
        self._next = checkpoint, keep, keep_every
        if self._work is None or self._work.done():
            self._work = self._threads.submit(self._send_all)

    def _send_all(self) -> None:
        while self._next:
            (path, keep, keep_every), self._next = self._next, None
            self.sending = path
            try:
                self._send(path)
                for old in folder.outdated(self.steps(), folder.step_of(path), keep, keep_every):
                    self._fs.rm(self._at(old), recursive=True)
            except Exception as error:
                log.warning("checkpoint.store=%s: %s was not sent (%s)", self.shown, path.name, reason(error))
            self.sending = None

    def _send(self, path: Path) -> None:
        to = self._at(folder.step_of(path))
        if self._fs.exists(f"{to}/{NAME}"):
            self._fs.rm(f"{to}/{NAME}")  # of a run that was taken back
        self._fs.makedirs(to, exist_ok=True)
        for name in [*Manifest.read(path).files, NAME]:
            self._fs.put_file(str(path / name), f"{to}/{name}")

    def fetch(self) -> None:
        """Copy the newest whole checkpoint here if it is newer than those in the run's folder. Raises UserError."""
        newest = folder.newest_step(self.run)
        for step in reversed(self.steps()):
            if newest is not None and step <= newest:
                return
            path = folder.path_of(self.run, step)
            temporary = path.with_name(path.name + folder.TEMPORARY)
            try:
                self._fetch(step, temporary)
                verify(temporary)
                temporary.replace(path)
                sync_folder(path.parent)
            except UserError:
                log.warning("checkpoint.store=%s: %s is damaged there", self.shown, path.name)
                continue
            except Exception as error:
                raise UserError(
                    f"checkpoint.store={self.shown}: {path.name} cannot be fetched ({reason(error)})"
                ) from error
            finally:
                folder.discard(temporary)
            log.warning("%s was fetched from checkpoint.store=%s", path.name, self.shown)
            return

    def _fetch(self, step: int, to: Path) -> None:
        folder.discard(to)  # a link, or what has links in it
        inner_folder(to.parent, to.name)
        self._fs.get_file(f"{self._at(step)}/{NAME}", str(to / NAME))
        files = Manifest.read(to).files
        needed, free = sum(file.bytes for file in files.values()), shutil.disk_usage(to).free
        if needed > free:
            raise OSError(f"it takes {format_bytes(needed)}, and {format_bytes(free)} are free in {self.run}")
        for name in files:
            self._fs.get_file(f"{self._at(step)}/{name}", str(to / name))

    def close(self) -> None:
        """Wait until everything is sent."""
        if self._work:
            self._work.result()
        self._threads.shutdown()

    def _at(self, step: int) -> str:
        return f"{self._root}/{folder.path_of(self.run, step).name}"


def open_store(address: str, run: Path, world: World, *, fetch: bool) -> Store | None:
    """On rank 0, the store at this address (empty: none). With `fetch`, the run's folder then has the newest checkpoint.

    All ranks call it. Raises UserError on all of them.
    """
    found: list[Store] = []

    def opened() -> None:
        found.append(Store(address, run))
        if fetch:
            found[0].fetch()

    if address:
        world.on_main(opened)
    return found[0] if found else None


def reason(error: BaseException) -> str:
    """The first line of an error, without secrets."""
    return redact(first_line(error))
