"""Compares a checkpoint with its checksums. Several ranks share the work: each verifies its share of the blocks."""

import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clipscale.checkpoint import archive
from clipscale.checkpoint.manifest import BLOCK, Manifest
from clipscale.checkpoint.shards import read_into
from clipscale.errors import UserError
from clipscale.files import opened
from clipscale.hardware import cores


def verify(path: Path, rank: int = 0, world: int = 1) -> int:
    """Verify a rank's share of a checkpoint; returns the bytes that it has read. Raises UserError for a damaged one.

    A checkpoint of format 1 or 2, a single file, is verified by rank 0 alone.
    """
    try:
        if path.is_dir():
            return _verify_folder(path, rank, world)
        return archive.verify(path) if rank == 0 else 0
    except Exception as error:  # zipfile, struct and zlib have their own
        raise damaged(path, error) from error


def _verify_folder(path: Path, rank: int, world: int) -> int:
    files = Manifest.read(path).files
    for name, file in files.items():
        held = (path / name).stat().st_size
        if held != file.bytes:
            raise ValueError(f"{name} has {held} bytes instead of {file.bytes}")
        if len(file.crc32) != -(-file.bytes // BLOCK):
            raise ValueError(f"{name} has checksums of {len(file.crc32)} blocks")
    blocks = [(name, number) for name, file in files.items() for number in range(len(file.crc32))][rank::world]

    def check(block: tuple[str, int]) -> int:
        name, number = block
        size = min(BLOCK, files[name].bytes - number * BLOCK)
        data = bytearray(size)
        with opened(path / name, buffering=0) as file:
            read_into(file, number * BLOCK, memoryview(data))
        if zlib.crc32(data) != files[name].crc32[number]:
            raise ValueError(f"checksum of {name} differs at byte {number * BLOCK}")
        return size

    with ThreadPoolExecutor(cores()) as threads:
        return sum(threads.map(check, blocks))


def damaged(path: Path, error: BaseException) -> UserError:
    """The error that a checkpoint cannot be used."""
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return UserError(f"checkpoint {path} is damaged or not a checkpoint ({reason})")
