"""Copies of a run at any address of fsspec (`checkpoint.copy`), which outlive the machine.

A copy is laid out as the run's folder: records and checkpoints. meta.json is copied last, so a checkpoint that has it
is whole. An empty file run=NAME names the run.
"""

from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem

from clipscale.checkpoint.folder import TEMPORARY, outdated
from clipscale.checkpoint.loading import read_meta, stream_size_and_crc32, verify
from clipscale.common.checkpoints import META, checkpoints_of, path_of, step_of
from clipscale.common.errors import UserError, library, one_line
from clipscale.common.terminal import tell
from clipscale.config.sections import CheckpointConfig

COPIED_RECORDS = ("config.yaml", "env.json", "metrics.jsonl", "eval/step_*.json", "result.json")


def open_store(address: str) -> DirFileSystem:
    local = {} if "://" in address else {"auto_mkdir": True}
    system, root = url_to_fs(address, use_listings_cache=False, **local)
    return DirFileSystem(root, system)


def complete_checkpoints(store: DirFileSystem, run: Path) -> list[Path]:
    """The whole checkpoints of the store, by step. Raises UserError if it holds another run's copy or other files."""
    names = store.glob("*")
    if names and f"run={run.name}" not in names:
        raise UserError(f"checkpoint.copy: it holds {names[-1]}, and not run={run.name}; choose another address")
    return sorted((Path(name).parent for name in store.glob(f"checkpoints/step_*/{META}")), key=step_of)


def restore_from_copy(run: Path, address: str, resume: str | None = None) -> None:
    """If the run has no checkpoint, fetch the newest whole one and the records.

    `resume`: the setting; only `auto` fetches. None: only check the store. Raises UserError.
    """
    own = checkpoints_of(run)
    with library(f"checkpoint.copy={address} cannot be read"):
        store = open_store(address)
        found = [] if own else complete_checkpoints(store, run)
        if found and resume not in ("auto", None):
            raise UserError("checkpoint.copy: it holds checkpoints; take resume=auto, or another address")
        while found and resume:
            path = found.pop()
            target = path_of(run, step_of(path))
            temporary = target.with_suffix(TEMPORARY)
            store.get(str(path), str(temporary), recursive=True)  # to a folder that is new
            try:
                verify(temporary)
            except UserError as error:
                if not found:
                    raise
                tell(f"warning: checkpoint.copy: {error}")
                continue
            copy_records(store, open_store(str(run)))
            temporary.replace(target)
            tell(f"{path.name} is taken from checkpoint.copy")
            break


def copy_records(source: DirFileSystem, target: DirFileSystem) -> None:
    for pattern in COPIED_RECORDS:
        for name in source.glob(pattern):
            target.pipe_file(TEMPORARY, source.cat_file(name))
            target.mv(TEMPORARY, name)


class Copies:
    """A thread that copies a run's newest checkpoint and its records, once at the start and once for each True in
    `due`.

    It completes a copy before it starts the next, of the checkpoint that is newest then. A checkpoint's files are read
    back and compared. An error prints a line, once per type until a copy succeeds; the next checkpoint is the retry.
    """

    def __init__(self, run: Path, config: CheckpointConfig) -> None:
        self.run, self.config = run, config
        self.copying: list[Path] = []
        """The checkpoint that must stay on the disk."""
        self.due: SimpleQueue[bool] = SimpleQueue()
        self.due.put(True)
        self.thread = Thread(target=self._work, daemon=True)

    def start(self) -> None:
        """Start the thread, if the settings ask for copies and no earlier stage has started it."""
        if self.config.copy and self.thread.ident is None:
            self.thread.start()

    def close(self, limit: float) -> None:
        """Copy the present state and end. Waits for that at most `limit` seconds."""
        self.due.put(True)
        self.due.put(False)
        if self.thread.is_alive():
            self.thread.join(limit)
            if self.thread.is_alive():
                tell(f"warning: checkpoint.copy: not complete after {limit:.0f} s")

    def _work(self) -> None:
        problem: type | None = None
        while self.due.get():
            try:
                self._copy(open_store(self.config.copy))
                problem = None
            except Exception as error:  # each library behind fsspec has its own
                if type(error) is not problem:
                    tell(f"warning: checkpoint.copy: {one_line(error)}; the run goes on")
                problem = type(error)
            self.copying = []

    def _copy(self, store: DirFileSystem) -> None:
        complete_checkpoints(store, self.run)
        self.copying = checkpoints_of(self.run)[-1:]  # the records that follow are no older
        store.pipe_file(f"run={self.run.name}", b"")
        copy_records(open_store(str(self.run)), store)
        for path in self.copying:
            copy_checkpoint(store, path)
            found = [each for each in complete_checkpoints(store, self.run) if each.name <= path.name]
            for name in {*store.glob("checkpoints/step_*")} - {*map(str, {*found} - {*outdated(found, self.config)})}:
                store.rm(name, recursive=True)


def copy_checkpoint(store: DirFileSystem, path: Path) -> None:
    """Copy a checkpoint that the store does not have. Raises OSError if a file that is read back differs."""
    prefix = f"checkpoints/{path.name}/"
    if (path / META).read_bytes() in store.cat([prefix + META], on_error="omit").values():
        return
    for name, expected in read_meta(path)["files"].items():
        store.put_file(str(path / name), prefix + name)
        with store.open(prefix + name) as stream:
            if [*stream_size_and_crc32(stream)] != expected:
                raise OSError(f"{path.name}/{name} differs when it is read back")
    store.put_file(str(path / META), prefix + META)
