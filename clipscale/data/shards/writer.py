"""Writes tar shards with webdataset.

Their bytes depend on the samples alone, and a shard has its name only when it is complete.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from webdataset import TarWriter

from clipscale.common.files import replacing


@contextmanager
def shard_writer(path: Path) -> Iterator[TarWriter]:
    """A writer of samples (`__key__`, and bytes by extension) to `path`; nothing is left there after an exception.
    Raises OSError where it cannot be written."""
    with (
        replacing(path) as file,
        # no time and no owner, which would differ between two runs; extensions that begin with `_` are kept
        TarWriter(file, user="", group="", mode=0o644, mtime=0, encoder=False, keep_meta=True) as writer,
    ):
        yield writer
