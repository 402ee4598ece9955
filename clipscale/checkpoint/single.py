"""Checkpoints of formats 1 and 2: one file of torch's, step_00001000.pt. They are read, and no longer written.

Format 1 has the optimizer's state by position instead of by parameter name.
"""

import zipfile
from pathlib import Path
from typing import Any

from clipscale.checkpoint import archive
from clipscale.files import opened


def verify(path: Path) -> int:
    """Compare every record with its checksum; returns the bytes read. A file of another kind than torch's archives has none.

    The archive is a zip file, for which `torch.save` computes a CRC-32 of every tensor. `torch.load` ignores them. Raises OSError,
    ValueError and zipfile's errors.
    """
    with opened(path) as file:
        if not archive.is_archive(file):
            return 0  # loading it fails, unless it is older than torch's archives
        size = path.stat().st_size
        archive.check_records(file, size)
        if damaged := zipfile.ZipFile(file).testzip():
            raise ValueError(f"checksum of {damaged} differs")
    return size


def load(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """The state on the CPU. Executes no pickled code. With `mmap`, tensors are read from the file when they are used.

    Raises ValueError for an unknown format, and torch's errors.
    """
    state = archive.load(path, mmap=mmap)
    if not isinstance(state, dict) or state.get("format") not in (1, 2):
        raise ValueError("it is not in this version's format")
    return state
