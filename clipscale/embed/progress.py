"""The features of an unfinished shard, in a file that only grows: a killed process loses no more than a group of samples.

K: features of a sample, D: feature width.
"""

import fcntl
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from clipscale.errors import UserError
from clipscale.files import open_lock


class Progress:
    """Groups of feature rows, in order, each after a checksum of its samples' keys and its rows.

    Only one process at a time may have it. Raises UserError where another one has.
    """

    def __init__(self, path: Path, shape: tuple[int, int], dtype: np.dtype) -> None:
        """`shape`: (K, D) of each row."""
        self.path, self.shape, self.dtype = path, shape, dtype
        self.file = open_lock(path)
        self.reading = True
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.file.close()
            raise UserError(f"out={path.parent}: another process writes there; wait for its end") from error
        except OSError:  # a file system without locks
            pass

    def next(self, keys: Sequence[str]) -> np.ndarray | None:
        """The stored rows of the next group, (n, K, D); None if it is not stored. What follows a damaged group is cut off."""
        if not self.reading:
            return None
        start, size = self.file.tell(), len(keys) * self.shape[0] * self.shape[1] * self.dtype.itemsize
        record = self.file.read(4 + size)
        if len(record) == 4 + size and record[:4] == _checksum(keys, record[4:]):
            return np.frombuffer(record, self.dtype, offset=4).reshape(len(keys), *self.shape)
        self.reading = False
        self.file.seek(start)
        self.file.truncate()
        return None

    def append(self, keys: Sequence[str], rows: np.ndarray) -> None:
        """Add the rows of a group that is not stored."""
        data = rows.tobytes()
        self.file.write(_checksum(keys, data) + data)
        self.file.flush()

    def close(self, *, complete: bool = False) -> None:
        """Close the file, and delete it if the shard is complete, or if there is nothing in it. Safe to call twice."""
        if not self.file.closed:
            if complete or not os.fstat(self.file.fileno()).st_size:
                self.path.unlink(missing_ok=True)  # while this process has the lock
            self.file.close()


def _checksum(keys: Sequence[str], data: bytes) -> bytes:
    names = "\0".join(keys).encode("utf-8", "surrogatepass")
    return zlib.crc32(data, zlib.crc32(names)).to_bytes(4, "little")
