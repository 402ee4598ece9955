"""Output that cannot end a run: its disk is full, its reader is gone, or it is closed."""

import io
import sys
from contextlib import suppress
from typing import Any


class _Lasting(io.FileIO):
    """stdout or stderr that drops output, and raises nothing, when the disk is full or the reader is gone."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            super().write(data)
        return len(data)


def outlive_output() -> None:
    """From here on nothing that this process prints ends it: a run is worth more than its output."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # else it was replaced already, or by a test
            with suppress(OSError):
                stream.flush()
            raw: Any = _Lasting(stream.fileno(), "w", closefd=False)
            lasting = io.TextIOWrapper(raw, stream.encoding, "backslashreplace", write_through=True)
            setattr(sys, name, lasting)
