"""Keeps a run alive when its output fails: the disk is full, the reader is gone, or the stream is closed."""

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from clipscale.common.terminal import log_warning, make_warnings_printable


def prepare_output() -> None:
    """Make warnings printable, escape what an output's encoding lacks, and drop what is written to a closed one.

    Every process of ours calls it once.
    """
    make_warnings_printable()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or Path(os.devnull).open("w")  # noqa: SIM115
        setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class _TolerantFile(io.FileIO):
    """stdout or stderr that drops output, and raises nothing, when the disk is full or the reader is gone."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            super().write(data)
        return len(data)


def ignore_output_errors() -> None:
    """From now on, an error of printing does not end this process: a run is worth more than its output."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # else it was replaced before, perhaps by a test
            with suppress(OSError):
                stream.flush()
            raw: Any = _TolerantFile(stream.fileno(), "w", closefd=False)
            lasting = io.TextIOWrapper(raw, stream.encoding, "backslashreplace", write_through=True)
            setattr(sys, name, lasting)


class RetryingLines:
    """A file of lines. Lines that a full disk refuses are kept, and written with the next one. One warning says so."""

    def __init__(self, file: io.FileIO) -> None:
        """`file`: lines are appended to it, unbuffered, so that a kill loses none."""
        self._file = file
        self._unwritten = bytearray()
        self._has_warned = False

    def append(self, line: str) -> None:
        self._unwritten += line.encode()
        try:
            del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            if not self._has_warned:
                log_warning(f"{self._file.name} cannot be written ({error.strerror}): lines are kept in memory")
            self._has_warned = True

    def close(self) -> None:
        """Write what waits in memory, and close the file."""
        self.append("")
        self._file.close()
