"""Reads the raw samples of a shard in their order.

`read_shard` reads tar files header by header, or sample by sample where an index gives the offsets, and rows of tables.
"""

import io
import lzma
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clipscale.data.sample import RawSample, key_and_extension
from clipscale.data.shards.access import Opened, SourceError, scheme_of
from clipscale.data.shards.store import Store
from clipscale.data.shards.tar import (
    BLOCK,
    ByteRange,
    CountedStream,
    next_member,
    read_exactly,
    seekable,
    skip,
    unpacked,
)

Want = Callable[[int], bool]
Kinds = Mapping[str, int] | None
Offsets = Callable[[str, Opened], np.ndarray | None] | None
Samples = Generator[RawSample, None, None]
"""The types of `read_shard`'s arguments and of its result."""
ONE_READ = 8 << 20
"""Indexed samples up to this size are read as a whole; of larger ones, only the wanted members."""


@dataclass
class ReadProblem:
    """Why the rest of a shard could not be read; `read_shard` fills it in."""

    reason: str | None = None
    detail: str = ""


@dataclass
class ShardStatistics:
    """What `read_shard` records of every sample, wanted or not."""

    offsets: list[int] = field(default_factory=list)
    """Where each sample's first header begins in the unpacked tar, and the end of the last sample."""
    members: Counter[str] = field(default_factory=Counter)
    """Extension -> number of members."""
    sizes: Counter[str] = field(default_factory=Counter)
    """Extension -> bytes of content."""
    packed: bool = False
    """Whether the shard is compressed, so that `offsets` are not places in the file."""


ERRORS = (tarfile.TarError, OSError, EOFError, ValueError, ArithmeticError, zlib.error, lzma.LZMAError, SourceError)
"""All that reading a damaged shard may raise."""


def read_shard(
    url: str,
    problem: ReadProblem,
    want: Want = lambda _: True,
    kinds: Kinds = None,
    *,
    lazy: bool = False,
    store: Store | None = None,
    offsets: Offsets = None,
    statistics: ShardStatistics | None = None,
) -> Samples:
    """The raw samples of a shard in their order. Ends early where the shard cannot be read further, and sets `problem`.

    A sample is a run of members with one key (`sample.key_and_extension`); a repeated member is ignored. Content is read
    only for samples whose index `want` accepts and for members in `kinds` (what `sample.limits` returns; None: all). A
    sample with a wanted member over its size limit has the damage `too_large` and no members. With `lazy`, the files
    that a table names are read by the sample's `load`, not here. `offsets` may return where the samples begin,
    (samples + 1,) bytes, from an index. Then unwanted samples are skipped without a read (their key is empty), and
    damage costs only the sample that it lies in. Members' names are never used as paths.
    """
    count = 0
    try:
        with closing(_samples(url, want, kinds, store or Store(), offsets, statistics)) as samples:
            for raw in samples:
                count += 1
                if not lazy:
                    raw.load()
                yield raw
    except SourceError as error:
        problem.reason, problem.detail = error.reason, f"{url}: {error}"
    except ERRORS as error:
        problem.reason = "truncated_shard" if count else "unreadable_shard"
        problem.detail = f"{url}: {_message(error)}"


def _message(error: Exception) -> str:
    reason = getattr(error, "strerror", None) or (error.args[0] if error.args else type(error).__name__)
    return str(reason)


def _samples(
    url: str, want: Want, kinds: Kinds, store: Store, offsets: Offsets, statistics: ShardStatistics | None
) -> Samples:
    """Opens the shard and reads it, whichever kind it is."""
    if scheme_of(url) == "table":
        from clipscale.data.shards import tables

        yield from tables.read_rows(url, want, kinds, store)
        return
    opened = store.open(url)
    with closing(opened.stream) as source:
        found = offsets(url, opened) if offsets is not None and seekable(source) else None
        if found is not None:
            yield from _read_indexed(url, source, found, want, kinds)
        else:
            yield from _read_sequential(url, source, want, kinds, statistics)


def _read_sequential(url: str, source: Any, want: Want, kinds: Kinds, statistics: ShardStatistics | None) -> Samples:
    """Reads header by header."""
    raw: RawSample | None = None
    wanted, first, start = False, 0, 0
    archive, packed = unpacked(source)
    if statistics is not None:
        statistics.packed = packed
    with closing(CountedStream(archive)) as stream:
        can_seek = seekable(stream)
        try:
            while True:
                start = stream.at
                header = next_member(stream)
                if header is None:
                    break
                name, size = header
                named = key_and_extension(name)
                if named is None:
                    skip(stream, size + -size % BLOCK, can_seek)
                    continue
                key, extension = named
                if raw is None or key != raw.key:
                    if raw is not None:
                        raw.extent = start - first
                        yield raw
                    raw, first = RawSample(url, key, 0 if raw is None else raw.index + 1, {}), start
                    wanted = want(raw.index)
                    if statistics is not None:
                        statistics.offsets.append(start)
                if statistics is not None:
                    statistics.members[extension] += 1
                    statistics.sizes[extension] += size
                _read_member(raw, name, extension, size, kinds if wanted else {}, stream, can_seek)
        except ERRORS as error:
            if raw is None or isinstance(error, SourceError):
                raise
            raise SourceError("truncated_shard", _message(error)) from error
        if raw is not None:
            raw.extent = start - first
            yield raw
        if statistics is not None:
            statistics.offsets.append(start)
            if stream.at == start:  # no block of zeros: where contents are skipped, the only sign of a cut
                message = "ends without the zeros that end an archive: it may have been cut off"
                raise SourceError("truncated_shard", message)


def _read_member(
    raw: RawSample, name: str, extension: str, size: int, kinds: Kinds, stream: Any, can_seek: bool
) -> None:
    """Reads a member's content if `kinds` has its extension, else skips it."""
    padded = size + -size % BLOCK
    if raw.accepts(name, extension, size, kinds):
        raw.members[extension] = read_exactly(stream, size)
        padded -= size
    skip(stream, padded, can_seek)


def _read_indexed(url: str, source: Any, offsets: np.ndarray, want: Want, kinds: Kinds) -> Samples:
    """Reads each wanted sample at its offset, with one read."""
    for index in range(len(offsets) - 1):
        start, stop = int(offsets[index]), int(offsets[index + 1])
        raw = RawSample(url, "", index, {}, extent=stop - start)
        if want(index):
            stream: Any = ByteRange(source, start, stop)
            if stop - start <= ONE_READ:
                stream = io.BytesIO(stream.read(stop - start))
            try:
                _read_sample(raw, stream, kinds)
            except (tarfile.TarError, ValueError) as error:
                raw = RawSample(url, "", index, {}, "damaged_sample", str(error), raw.extent)
        yield raw


def _read_sample(raw: RawSample, stream: Any, kinds: Kinds) -> None:
    while (header := next_member(stream)) is not None:
        name, size = header
        named = key_and_extension(name)
        if named is not None:
            raw.key = raw.key or named[0]
            if named[0] != raw.key:
                raise tarfile.ReadError(f"two samples, {raw.key!r} and {named[0]!r}, where the index has one")
            _read_member(raw, name, named[1], size, kinds, stream, True)
        else:
            skip(stream, size + -size % BLOCK, True)
