"""Copies a run's checkpoints and records to its store, in a thread."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

from fsspec.implementations.dirfs import DirFileSystem

from clipscale.checkpoint.copy_store import (
    COPIED_FILES,
    LOCAL,
    checkpoints_in_store,
    complete_checkpoints,
    copy_records,
    open_store,
)
from clipscale.checkpoint.format import read_meta, stream_size_and_crc32
from clipscale.checkpoint.retention import Retention
from clipscale.common.errors import UserError, one_line
from clipscale.common.remote import ANSWER_S, MIN_BYTES_PER_S, within_time
from clipscale.common.terminal import log_line, log_warning
from clipscale.distributed.world import World
from clipscale.run_folder.disk import COPYING
from clipscale.run_folder.paths import EARLIER, EVAL, META, RESULT, checkpoints_of
from clipscale.run_folder.records import RunResult

# A run that waits for its last copy prints that it does after this many seconds.
ANNOUNCE_AFTER_S = 1.0


class CheckpointUploader:
    """Copies a run's newest checkpoint and its records to a store, one copy at a time, in a thread.

        start, request:   copies what is then the newest checkpoint; reads its files back and compares them
        an error:         is printed once for its type; the next `request` tries again
        finish:           makes a last copy and waits for it; a complete run's has result.json

    Checkpoints in the store that are later than the run's newest one are not deleted.
    """

    def __init__(self, run_dir: Path, address: str, retention: Retention) -> None:
        """`address`: the store's. `retention`: which checkpoints stay in it."""
        self.run_dir = run_dir
        self.address = address
        self.retention = retention
        # The checkpoint that is being uploaded, which must stay on the disk meanwhile; see `upload_choice_locked`.
        self.uploading: list[Path] = []
        self._choice_lock = Lock()
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

    @contextmanager
    def upload_choice_locked(self) -> Iterator[list[Path]]:
        """In this context, the uploader chooses no other checkpoint. Yields the one that is being uploaded, if there is
        one.

        Delete the run's outdated checkpoints inside. The uploader lists the checkpoints and then chooses the newest,
        which could otherwise be deleted between the two.
        """
        with self._choice_lock:
            yield self.uploading

    def finish(self, limit_s: float, result: RunResult | None = None) -> bool:
        """Copy the present state and end. Waits at most ANNOUNCE_AFTER_S + `limit_s` seconds.

        Returns whether the store has the state. A warning says if it lacks the state.

        `result`: what a complete run returns. It is copied last, as result.json. If this returns true, the
        caller also writes it into the run's folder. If not, that file is missing, and the same command copies again.
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
            except Exception as error:  # each library behind fsspec raises exceptions of its own
                self.problem = one_line(error)
                if type(error) is not reported and not self.is_abandoned:
                    log_warning(f"checkpoint.copy: {self.problem}; the run continues")
                reported = type(error)
            self.uploading = []

    def _copy(self, store: DirFileSystem) -> None:
        complete_checkpoints(store, self.run_dir)
        remove_parts(store)
        with self._choice_lock:
            # Chosen before the records, which are then at least as new.
            self.uploading = checkpoints_of(self.run_dir)[-1:]
        store.pipe_file(f"run={self.run_dir.name}", b"")
        copy_records(DirFileSystem(str(self.run_dir), LOCAL), store)
        remove_set_aside(store, self.run_dir)
        for path in self.uploading:
            copy_checkpoint(store, path)
            for old in self.retention.outdated(complete_checkpoints(store, self.run_dir), path.name):
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
def finish_copy_on_failed_start(uploader: CheckpointUploader | None, world: World, limit_s: float) -> Iterator[None]:
    """Context of the start of a later stage. If it fails, waits at most `limit_s` for the copy of the stage before."""
    try:
        yield
    except UserError:
        if uploader and world.is_rank0:
            uploader.finish(limit_s)
        raise


def remove_set_aside(store: DirFileSystem, run_dir: Path) -> None:
    """Remove the store's results that the run has set aside (`set_aside_later_steps`): it trains those steps again."""
    for name in store.find(EVAL):
        is_aside = any(run_dir.glob(f"{EARLIER}*/{Path(name).name}"))
        if COPIED_FILES.fullmatch(name) and is_aside and not (run_dir / name).exists():
            store.rm_file(name)


def remove_parts(store: DirFileSystem) -> None:
    """Remove the remains of copies that failed or were killed: the next copy needs the space."""
    complete = checkpoints_in_store(store, f"/{META}")
    for path in [path for path in checkpoints_in_store(store) if path not in complete]:
        store.rm(str(path), recursive=True)
    if store.exists(COPYING):
        store.rm_file(COPYING)
