"""Copies of a run at any address of fsspec (`checkpoint.copy`), which outlive the machine.

A copy is laid out as the run's folder: records and checkpoints. meta.json is copied last, so a checkpoint that has it
is whole. An empty file run=NAME names the run.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from clipscale.checkpoint.format import read_meta, stream_size_and_crc32
from clipscale.checkpoint.loading import verify
from clipscale.checkpoint.retention import Retention
from clipscale.common.errors import UserError, one_line, to_user_error
from clipscale.common.goal import Goal
from clipscale.common.record import RunResult
from clipscale.common.remote import (
    ANSWER_S,
    MIN_BYTES_PER_S,
    NO_CREDENTIALS,
    check_copy_address,
    check_credentials,
    no_credentials,
    within_time,
)
from clipscale.common.terminal import log_line, log_warning
from clipscale.distributed.world import World
from clipscale.run_folder.chosen_checkpoint import Best
from clipscale.run_folder.disk import COPYING, TEMPORARY, discard
from clipscale.run_folder.names import (
    EARLIER,
    EVAL,
    META,
    METRICS,
    RESULT,
    RUN_RECORDS,
    checkpoints_of,
    settings_of_run,
    step_of,
)
from clipscale.run_folder.set_aside import set_aside_records

COPIED_FILES = re.compile("|".join(record.copied for record in RUN_RECORDS if record.copied))
# Beginning and end of messages about a store.
UNREADABLE = "checkpoint.copy={} cannot be read"
WITHOUT_COPY = "; checkpoint.copy= continues without it"
# A run that waits for its last copy prints that it does after this many seconds.
ANNOUNCE_AFTER_S = 1.0
LOCAL = LocalFileSystem(auto_mkdir=True)


class TimeLimited:
    """A file system whose calls raise TimeoutError if the store does not answer in time."""

    def __init__(self, system: AbstractFileSystem, awaited: str, *, announce: bool) -> None:
        """`announce`: print a line after a while, which says that the run waits for `awaited`."""
        self._system = system
        self._within = partial(within_time, awaited=awaited, announce=announce)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._system, name)
        if name.startswith("_") or not callable(value):
            return value
        return lambda *args, **options: self._within(partial(value, *args, **options), limit_s=ANSWER_S)

    def put_file(self, source: str, target: str, **options: Any) -> None:
        limit_s = ANSWER_S + Path(source).stat().st_size / MIN_BYTES_PER_S
        self._within(partial(self._system.put_file, source, target, **options), limit_s=limit_s)

    def get(self, sources: list[str], targets: list[str], **options: Any) -> None:
        """Fetch files. It has no time limit as long as bytes arrive."""

        def arrived() -> int:
            return sum(path.stat().st_size for path in map(Path, targets) if path.exists())

        work = partial(self._system.get, sources, targets, **options)
        self._within(work, limit_s=ANSWER_S, progress=arrived)


def open_store(address: str, *, announce: bool = True) -> DirFileSystem:
    """The store at an address. `announce`: see `TimeLimited`.

    Raises UserError for an address that cannot keep a copy.
    """
    check_copy_address(address)
    subject = f"checkpoint.copy={address}"
    check_credentials(address.partition("://")[0], subject)
    system, root = url_to_fs(address, use_listings_cache=False)
    system = LOCAL if isinstance(system, LocalFileSystem) else system
    return DirFileSystem(root, TimeLimited(system, subject, announce=announce))


def checkpoints_in_store(store: DirFileSystem, end: str = "") -> list[Path]:
    """The checkpoints in the store, sorted by step. `end`: take only checkpoints that have this file."""
    names = store.find("checkpoints", withdirs=True)  # no glob: the address may hold its special characters
    paths = [Path(name.removesuffix(end)) for name in names if re.fullmatch(rf"checkpoints/step_\d+{end}", name)]
    return sorted(paths, key=step_of)


def complete_checkpoints(store: DirFileSystem, run: Path) -> list[Path]:
    """The store's complete checkpoints, sorted by step. Raises UserError for another run's copy or other files."""
    names = store.find("", maxdepth=1, withdirs=True)[1:]  # the first is the store itself
    if names and f"run={run.name}" not in names:
        raise UserError(f"checkpoint.copy: it holds {names[-1]}, and not run={run.name}; choose another address")
    return checkpoints_in_store(store, f"/{META}")


def complete_checkpoints_or_credentials_error(store: DirFileSystem, run: Path, address: str) -> list[Path]:
    """`complete_checkpoints`, but a store that needs credentials also raises UserError. `address`: for the message."""
    try:
        return complete_checkpoints(store, run)
    except Exception as error:
        if type(error).__name__ in NO_CREDENTIALS:
            raise no_credentials(f"checkpoint.copy={address}", error) from error
        raise


def check_copy(run: Path, address: str) -> None:
    """Raise UserError if the store cannot be read, or holds another run's copy or other files."""
    with to_user_error(UNREADABLE.format(address), WITHOUT_COPY):
        complete_checkpoints_or_credentials_error(open_store(address), run, address)


def restore_from_copy(run: Path, address: str, resume: str, newest_own: Path | None = None) -> bool:
    """Fetch the store's newest complete checkpoint, with its records. Returns whether it fetched a checkpoint.

    If it fetches none and the run's folder has no records, it fetches the records alone. With `auto` it also fetches
    the best checkpoint if the folder has not got it. Raises UserError.

    `resume`: the setting; only `auto` fetches. `newest_own`: the checkpoint from which the run would go on without the
    store; with `resume=PATH` it may be another run's. Only a checkpoint of a later step is fetched. If `newest_own` is
    given, a store that cannot be read is a warning, not an error.
    """
    unreadable = UNREADABLE.format(address)
    with to_user_error(unreadable, WITHOUT_COPY):
        store = open_store(address)
        try:
            in_store = complete_checkpoints_or_credentials_error(store, run, address)
        except Exception as error:
            if not newest_own or isinstance(error, UserError):
                raise
            log_warning(f"{unreadable} ({one_line(error)}); the run continues from {newest_own.name}")
            return False
        newer = [path for path in in_store if not newest_own or step_of(path) > step_of(newest_own)]
        if newer and resume != "auto":
            raise UserError(
                f"resume={resume}: checkpoint.copy holds {newer[-1].name}, which is later; give another address, or "
                "resume=auto to resume from it"
            )
        is_fetched = restore_newest(store, newer, run, address, has_own=newest_own is not None)
        if resume == "auto":
            if not is_fetched and not (run / METRICS).exists():  # the start will drop lines of later steps
                copy_records(store, DirFileSystem(str(run), LOCAL))
            restore_best(store, in_store, run)  # in every start: the one that fetched the newest may have been killed
    return is_fetched


def restore_newest(store: DirFileSystem, newer: list[Path], run: Path, address: str, *, has_own: bool) -> bool:
    """Fetch the last of the checkpoints that is not damaged, with its records. Returns whether there was one.

    `has_own`: whether the run's own folder has a checkpoint. If not, and all of these are damaged, raises UserError.
    """
    for path in reversed(newer):
        try:
            restore(store, path, run)
            return True
        except UserError as error:
            if path is newer[0] and not has_own:
                raise UserError(
                    f"checkpoint.copy={address} holds no intact checkpoint ({error}); give another address"
                ) from error
            log_warning(f"checkpoint.copy: {error}")
    return False


def restore(store: DirFileSystem, path: Path, run: Path) -> None:
    """Fetch a checkpoint and the records. Raises UserError, and changes nothing, if it is damaged."""
    with fetched_checkpoint(store, path, run) as temporary:
        log_line(f"{path.name} is restored from checkpoint.copy: the run's folder has no intact checkpoint that recent")
        set_aside_records(run, "continues from its copy")
        copy_records(store, DirFileSystem(str(run), LOCAL))
        discard(run / path)
        temporary.replace(run / path)


def restore_best(store: DirFileSystem, in_store: list[Path], run: Path) -> None:
    """Fetch the run's best checkpoint, if its folder has not got it. Where it cannot be fetched, a line says so."""
    name = "the best checkpoint"
    try:
        goal = settings_of_run(run).get("checkpoint", {}).get("best", "")
        own = checkpoints_of(run)
        earlier = [path for path in in_store if own and step_of(path) <= step_of(own[-1])]
        best = Best(run, Goal.parse("checkpoint.best", goal)).among(map(step_of, [*own, *earlier])) if goal else None
        for path in earlier:
            if step_of(path) == best and not (run / path).exists():
                name = f"the best checkpoint, {path.name},"
                with fetched_checkpoint(store, path, run) as temporary:
                    temporary.replace(run / path)
                log_line(f"{path.name}, the best by checkpoint.best={goal}, is restored from checkpoint.copy, too")
    except Exception as error:  # each library behind fsspec has its own
        log_warning(f"checkpoint.copy: {name} could not be fetched and remains only there ({one_line(error)})")


@contextmanager
def fetched_checkpoint(store: DirFileSystem, path: Path, run: Path) -> Iterator[Path]:
    """A checkpoint of the store, in a temporary folder of the run. Raises UserError if it is damaged."""
    temporary = (run / path).with_suffix(TEMPORARY)
    names = store.ls(str(path), detail=False)
    try:
        store.get(names, [str(temporary / Path(name).name) for name in names])
        verify(temporary)
        yield temporary
    finally:
        discard(temporary)


def copy_records(source: DirFileSystem, target: DirFileSystem) -> None:
    """Copy the run's records. Each appears whole or not at all."""
    for name in source.find("", maxdepth=2):
        if COPIED_FILES.fullmatch(name):
            target.pipe_file(COPYING, source.cat_file(name))
            target.mv(COPYING, name)


def remove_set_aside(store: DirFileSystem, run: Path) -> None:
    """Remove the store's results that the run has set aside (`set_aside_later_steps`): it trains those steps again."""
    for name in store.find(EVAL):
        is_aside = any(run.glob(f"{EARLIER}*/{Path(name).name}"))
        if COPIED_FILES.fullmatch(name) and is_aside and not (run / name).exists():
            store.rm_file(name)


def remove_parts(store: DirFileSystem) -> None:
    """Remove the remains of copies that failed or were killed: the next copy needs the space."""
    complete = checkpoints_in_store(store, f"/{META}")
    for path in [path for path in checkpoints_in_store(store) if path not in complete]:
        store.rm(str(path), recursive=True)
    if store.exists(COPYING):
        store.rm_file(COPYING)


class CheckpointUploader:
    """Copies a run's newest checkpoint and its records to a store, one copy at a time, in a thread.

        start, request:   copies what is then the newest checkpoint; reads its files back and compares them
        an error:         is printed once for its type; the next `request` tries again
        close:            makes a last copy and waits for it; a complete run's has result.json

    Checkpoints in the store that are later than the run's newest one are not deleted.
    """

    def __init__(self, run: Path, address: str, retention: Retention) -> None:
        """`address`: the store's. `retention`: which checkpoints stay in it."""
        self.run = run
        self.address = address
        self.retention = retention
        # The checkpoint that is being uploaded, which must stay on the disk meanwhile.
        self.uploading: list[Path] = []
        # Why the store does not have the run's newest state.
        self.problem = ""
        # What a complete run returns.
        self.result: RunResult | None = None
        # Whether the run has ended without its last copy.
        self.is_abandoned = False
        # True: copy the present state. False: end.
        self._tasks: SimpleQueue[bool] = SimpleQueue()
        self.thread = Thread(target=self._work, daemon=True)

    def start(self) -> None:
        """Begin to copy, at once and then at each `request`."""
        self.request()
        self.thread.start()

    def request(self) -> None:
        """Copy the present state, after any copy that is being made."""
        self._tasks.put(True)

    def close(self, limit_s: float, result: RunResult | None = None) -> bool:
        """Copy the present state and end. Waits at most ANNOUNCE_AFTER_S + `limit_s` seconds.

        Returns whether the store has the state. A warning says if it lacks the state.

        `result`: what a complete run returns. It is copied last, as result.json. The caller writes it into the
        run's folder if this returns true. Without it, the same command starts again and copies again.
        """
        self.result = result
        self.request()
        self._tasks.put(False)
        self.thread.join(ANNOUNCE_AFTER_S)
        if self.thread.is_alive():
            log_line("copying the last checkpoint; if interrupted, the next start of this run finishes the copy")
            try:
                self.thread.join(limit_s)
            finally:
                self.is_abandoned = self.thread.is_alive()
        if self.problem:
            log_warning(
                f"checkpoint.copy: the run's last state has no complete copy ({self.problem}); repair the store "
                "or choose another address, and give the command again"
            )
            return False
        return True

    def _work(self) -> None:
        reported: type | None = None
        while self._tasks.get():
            self.problem = "it is not complete"
            try:
                self._copy(open_store(self.address, announce=False))
                self.problem = ""
                reported = None
            except Exception as error:  # each library behind fsspec has its own
                self.problem = one_line(error)
                if type(error) is not reported and not self.is_abandoned:
                    log_warning(f"checkpoint.copy: {self.problem}; the run continues")
                reported = type(error)
            self.uploading = []

    def _copy(self, store: DirFileSystem) -> None:
        complete_checkpoints(store, self.run)
        remove_parts(store)
        self.uploading = checkpoints_of(self.run)[-1:]  # chosen before the records, which are then at least as new
        store.pipe_file(f"run={self.run.name}", b"")
        copy_records(DirFileSystem(str(self.run), LOCAL), store)
        remove_set_aside(store, self.run)
        for path in self.uploading:
            copy_checkpoint(store, path)
            for old in self.retention.outdated(complete_checkpoints(store, self.run), path.name):
                store.rm(str(old), recursive=True)
        if self.result:
            store.pipe_file(RESULT, json.dumps(self.result).encode())


def copy_checkpoint(store: DirFileSystem, path: Path) -> None:
    """Copy a checkpoint that the store does not have. Raises OSError if a file that is read back differs."""
    prefix = f"checkpoints/{path.name}/"
    meta = prefix + META

    def read_back(name: str) -> list[int]:
        """Size and CRC-32 of a file of the copy, as meta.json has them."""
        with store.open(prefix + name) as stream:
            return [*stream_size_and_crc32(stream)]

    if store.isfile(meta) and store.cat_file(meta) == (path / META).read_bytes():
        return
    for name, expected in read_meta(path)["files"].items():
        store.put_file(str(path / name), prefix + name)
        limit_s = ANSWER_S + expected[0] / MIN_BYTES_PER_S
        if within_time(partial(read_back, name), name, limit_s, announce=False) != expected:
            raise OSError(f"{path.name}/{name} differs when it is read back")
    store.put_file(str(path / META), COPYING)
    store.mv(COPYING, meta)


@contextmanager
def waiting_for_copy_if_start_fails(
    uploader: CheckpointUploader | None, world: World, limit_s: float
) -> Iterator[None]:
    """Around the start of a later stage. If it fails, waits at most `limit_s` for the copy of the stage before."""
    try:
        yield
    except UserError:
        if uploader and world.is_rank0:
            uploader.close(limit_s)
        raise
