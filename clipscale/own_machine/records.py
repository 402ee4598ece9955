"""Records of a run that cannot be read are set aside, and those that a full disk refuses wait in memory."""

import logging
import secrets
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import TypeVar

from clipscale.common.files import DAMAGED, reason_of
from clipscale.common.terminal import tell

log = logging.getLogger(__name__)
T = TypeVar("T")


def read_or_set_aside(path: Path, read: Callable[[Path], T]) -> T | None:
    """`read(path)`; None if the file is damaged, which is renamed and reported."""
    try:
        return read(path)
    except DAMAGED as error:
        set_file_aside(path, reason_of(error))
        return None


def set_file_aside(path: Path, reason: str) -> None:
    """Rename a damaged record; its run continues without it."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.damaged")
    path.rename(aside)
    log.warning("%s is damaged (%s); it is now %s, and the run goes on", path, reason, aside.name)


def set_folders_aside(paths: Iterable[Path]) -> None:
    """Rename folders that are in the place of records."""
    for path in paths:
        if path.is_dir():
            set_file_aside(path, "a folder")


class LastingLines:
    """A file of lines. Those that a full disk refuses are kept, and written with the next one; one warning says so."""

    def __init__(self, file: FileIO) -> None:
        """`file`: lines are appended to it, unbuffered, so that a kill loses none."""
        self._file = file
        self._unwritten = bytearray()
        self._is_said = False

    def append(self, line: str) -> None:
        self._unwritten += line.encode()
        try:
            del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            if not self._is_said:
                tell(f"warning: {self._file.name} cannot be written ({error.strerror}): lines wait in memory")
            self._is_said = True

    def close(self) -> None:
        """Write what waits in memory, and close the file."""
        self.append("")
        self._file.close()
