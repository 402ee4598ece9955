"""Writes tar shards with webdataset.

Their bytes depend on the samples alone. A shard gets its name when it is complete.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from webdataset import TarWriter

from clipscale.common.files import replacing


@contextmanager
def shard_writer(path: Path) -> Iterator[TarWriter]:
    """A writer of samples (`__key__`, and bytes by extension) to `path`. After an exception there is no file. Raises
    OSError if it cannot be written."""
    with (
        replacing(path) as file,
        # no time and no owner: they would differ between two runs; keep_meta: extensions may begin with `_`
        TarWriter(file, user="", group="", mode=0o644, mtime=0, encoder=False, keep_meta=True) as writer,
    ):
        yield writer
