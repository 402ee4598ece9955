"""Writes tar shards.

Their bytes depend on the samples alone. A shard gets its name when it is complete.
"""

import io
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from clipscale.common.files import replacing


class ShardWriter:
    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar

    def write(self, sample: Mapping[str, str | bytes]) -> None:
        """Add a sample: `__key__`, and the bytes of its members by extension."""
        key = sample["__key__"]
        assert isinstance(key, str)
        for extension in sorted(sample.keys() - {"__key__"}):
            data = sample[extension]
            assert isinstance(data, bytes), extension
            # no time and no owner: they would differ between two runs
            member = tarfile.TarInfo(f"{key}.{extension}")
            member.size = len(data)
            self._tar.addfile(member, io.BytesIO(data))


@contextmanager
def shard_writer(path: Path) -> Iterator[ShardWriter]:
    """A writer of samples to `path`. After an exception there is no file. Raises OSError if it cannot be written."""
    with replacing(path) as file, tarfile.open(fileobj=file, mode="w|") as tar:
        yield ShardWriter(tar)
