"""The store of a run's copy: any address of fsspec (`checkpoint.copy`). A copy outlives the machine.

A copy is laid out as the run's folder: records and checkpoints. meta.json is copied last, so a checkpoint that has it
is whole. An empty file run=NAME names the run. `upload.py` makes the copy, `download.py` fetches from it.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from clipscale.common.errors import UserError
from clipscale.common.remote import ANSWER_S, MIN_BYTES_PER_S, check_copy_address, check_credentials, within_time
from clipscale.run_folder.disk import COPYING
from clipscale.run_folder.paths import META, step_of
from clipscale.run_folder.records import RUN_RECORDS

COPIED_FILES = re.compile("|".join(record.copied for record in RUN_RECORDS if record.copied))
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

    def put_file(self, source: str, target: str, **options: object) -> None:
        limit_s = ANSWER_S + Path(source).stat().st_size / MIN_BYTES_PER_S
        self._within(partial(self._system.put_file, source, target, **options), limit_s=limit_s)

    def get(self, sources: list[str], targets: list[str], **options: object) -> None:
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


def complete_checkpoints(store: DirFileSystem, run_dir: Path) -> list[Path]:
    """The store's complete checkpoints, sorted by step. Raises UserError for another run's copy or other files."""
    names = store.find("", maxdepth=1, withdirs=True)[1:]  # the first is the store itself
    if names and f"run={run_dir.name}" not in names:
        raise UserError(f"checkpoint.copy: it holds {names[-1]}, and not run={run_dir.name}; choose another address")
    return checkpoints_in_store(store, f"/{META}")


def copy_records(source: DirFileSystem, target: DirFileSystem) -> None:
    """Copy the run's records. Each appears whole or not at all."""
    for name in source.find("", maxdepth=2):
        if COPIED_FILES.fullmatch(name):
            target.pipe_file(COPYING, source.cat_file(name))
            target.mv(COPYING, name)
