"""What is inside a shard: its raw samples in their order."""

import io
import lzma
import os
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
from clipscale.data.shards.tar import BLOCK, Metered, Stretch, next_member, pass_over, read_exactly, seekable, unpacked

ONE_READ = 8 << 20
"""Samples up to this size are read whole where an index says where they lie; of larger ones, what is wanted."""


@dataclass
class ReadProblem:
    """Why the rest of a shard could not be read; filled by `read_shard`."""

    reason: str | None = None
    detail: str = ""


@dataclass
class Census:
    """What `read_shard` notes of every sample, whether it is wanted or not."""

    starts: list[int] = field(default_factory=list)
    """Where each sample's first header begins in the unpacked tar, and the end of the last sample."""
    members: Counter[str] = field(default_factory=Counter)
    """Extension -> members."""
    sizes: Counter[str] = field(default_factory=Counter)
    """Extension -> bytes of content."""


ERRORS = (tarfile.TarError, OSError, EOFError, ValueError, ArithmeticError, zlib.error, lzma.LZMAError, SourceError)
"""What reading a shard may raise, however it is damaged."""


def read_shard(
    url: str,
    problem: ReadProblem,
    want: Callable[[int], bool] = lambda _: True,
    kinds: Mapping[str, int] | None = None,
    *,
    later: bool = False,
    store: Store | None = None,
    places: Callable[[str, Opened], np.ndarray | None] | None = None,
    census: Census | None = None,
) -> Generator[RawSample, None, None]:
    """The raw samples of a shard in their order. Ends early where the shard cannot be read on, saying why in `problem`.

    A sample is a run of members with one key, by webdataset's rule for names (its key ends at the first dot after the last slash).
    Contents are read for samples whose index is wanted and members whose extension is (`sample.limits`; None: all); the rest is seeked over
    where the source can seek. A sample with a wanted member that is larger than it may be has the damage `too_large`, and no members.
    With `later`, the files that a table names are not read here, but when the sample's `fill` is called.
    `places` may know, from an index, where the samples begin: (samples + 1,) byte offsets. Then samples that are not wanted are not even
    looked at (their key is empty), and damage costs only the sample that it lies in.
    Names are names only: nothing is ever written or opened by them. A second member of the same name in a sample is ignored.
    """
    count = 0
    try:
        if scheme_of(url) == "table":
            from clipscale.data.shards import tables

            for raw in tables.read(url, want, kinds, store or Store()):
                count += 1
                if not later:
                    raw.fill()
                yield raw
            return
        opened = (store or Store()).open(url)
        with closing(opened.stream) as source:
            offsets = places(url, opened) if places is not None and seekable(source) else None
            if offsets is not None:
                samples = _read_places(url, source, offsets, want, kinds)
            else:
                samples = _read_on(url, source, want, kinds, census)
            for raw in samples:
                count += 1
                yield raw
    except SourceError as error:
        problem.reason, problem.detail = error.reason, f"{url}: {error}"
    except ERRORS as error:
        problem.reason = "truncated_shard" if count or isinstance(error, _InsideError) else "unreadable_shard"
        problem.detail = f"{url}: {error.args[0] if error.args else type(error).__name__}"


class _InsideError(tarfile.ReadError):
    """Damage after the shard's first member."""


def _read_on(
    url: str,
    source: Any,
    want: Callable[[int], bool],
    kinds: Mapping[str, int] | None,
    census: Census | None,
) -> Generator[RawSample, None, None]:
    """Header by header."""
    raw: RawSample | None = None
    here, first, start = False, 0, 0
    with closing(Metered(unpacked(source))) as stream:
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
                    pass_over(stream, size + -size % BLOCK, can_seek)
                    continue
                own, extension = named
                if raw is None or own != raw.key:
                    if raw is not None:
                        raw.extent = start - first
                        yield raw
                    raw, first = RawSample(url, own, 0 if raw is None else raw.index + 1, {}), start
                    here = want(raw.index)
                    if census is not None:
                        census.starts.append(start)
                if census is not None:
                    census.members[extension] += 1
                    census.sizes[extension] += size
                if here and raw.admits(name, extension, size, kinds):
                    raw.members[extension] = read_exactly(stream, size)
                    pass_over(stream, -size % BLOCK, can_seek)
                else:
                    pass_over(stream, size + -size % BLOCK, can_seek)
        except ERRORS as error:
            if raw is None or isinstance(error, SourceError):
                raise
            raise _InsideError(error.args[0] if error.args else type(error).__name__) from error
        if raw is not None:
            raw.extent = start - first
            yield raw
        if census is not None:
            census.starts.append(start)
            if stream.at == start:  # no block of zeros; where contents are seeked over, this is all that shows a cut
                raise _InsideError("ends without the zeros that end an archive: it may have been cut off")


def _read_places(
    url: str,
    source: Any,
    places: np.ndarray,
    want: Callable[[int], bool],
    kinds: Mapping[str, int] | None,
) -> Generator[RawSample, None, None]:
    """Sample by sample where the index says that they lie, each with one read."""
    for index in range(len(places) - 1):
        start, stop = int(places[index]), int(places[index + 1])
        raw = RawSample(url, "", index, {}, extent=stop - start)
        if want(index):
            stream: Any = Stretch(source, start, stop)
            if stop - start <= ONE_READ:
                stream = io.BytesIO(stream.read(stop - start))
            try:
                _read_sample(raw, stream, kinds)
            except (tarfile.TarError, ValueError) as error:
                raw = RawSample(url, "", index, {}, "damaged_sample", str(error), raw.extent)
        yield raw


def _read_sample(raw: RawSample, stream: Any, kinds: Mapping[str, int] | None) -> None:
    while (header := next_member(stream)) is not None:
        name, size = header
        named = key_and_extension(name)
        if named is not None:
            raw.key = raw.key or named[0]
            if named[0] != raw.key:
                raise tarfile.ReadError(f"two samples, {raw.key!r} and {named[0]!r}, where the index has one")
            if raw.admits(name, named[1], size, kinds):
                raw.members[named[1]] = read_exactly(stream, size)
                stream.seek(-size, os.SEEK_CUR)
        stream.seek(size + -size % BLOCK, os.SEEK_CUR)
