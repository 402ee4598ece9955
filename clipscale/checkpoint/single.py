"""Checkpoints of formats 1 and 2: one file of torch's, step_00001000.pt. They are read, and no longer written.

Format 1 has the optimizer's state by position instead of by parameter name.
"""

import os
import struct
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from clipscale.checkpoint import archive
from clipscale.checkpoint.manifest import BLOCK
from clipscale.files import opened
from clipscale.hardware import cores


def verify(path: Path) -> int:
    """Compare every record with its checksum; returns the bytes read. A file of another kind than torch's archives has none.

    The archive is a zip file, for which `torch.save` computes a CRC-32 of every tensor. `torch.load` ignores them. Reads in one thread per
    core: a checksum takes longer than a read from the page cache. Raises OSError, ValueError and zipfile's errors.
    """
    with opened(path) as file:
        if not archive.is_archive(file):
            return 0  # loading it fails, unless it is older than torch's archives
        size = path.stat().st_size
        archive.check_records(file, size)
        packed = zipfile.ZipFile(file)
        records = packed.infolist()
        for record in records:
            packed.open(record).close()  # compares the record's header with the directory
        with ThreadPoolExecutor(cores()) as threads:
            for record, found in zip(records, threads.map(lambda one: checksum(file.fileno(), one), records)):
                if found != record.CRC:
                    raise ValueError(f"checksum of {record.filename} differs")
    return size


def checksum(file: int, record: zipfile.ZipInfo) -> int:
    """CRC-32 of a record's bytes in the open file of the archive; see `archive.check_records`."""
    header = os.pread(file, 30, record.header_offset)
    name, extra = struct.unpack_from("<HH", header, 26)
    position = record.header_offset + 30 + name + extra
    end, value = position + record.file_size, 0
    while position < end:
        block = os.pread(file, min(BLOCK, end - position), position)
        if not block:
            raise ValueError(f"{record.filename} is cut off")
        value = zlib.crc32(block, value)
        position += len(block)
    return value


def load(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """The state on the CPU. Executes no pickled code. With `mmap`, tensors are read from the file when they are used.

    Raises ValueError for an unknown format, and torch's errors.
    """
    state = archive.load(path, mmap=mmap)
    if not isinstance(state, dict) or state.get("format") not in (1, 2):
        raise ValueError("it is not in this version's format")
    return state
