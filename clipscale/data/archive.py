"""What is inside a shard: its raw samples in their order."""

import io
import lzma
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Container, Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clipscale.data.sample import RawSample, key_and_extension
from clipscale.data.sources import Opened, SourceError, scheme_of
from clipscale.data.store import Store
from clipscale.data.tar import BLOCK, Metered, next_member, pass_over, read_exactly, seekable, unpacked


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
    extensions: Container[str] | None = None,
    *,
    store: Store | None = None,
    places: Callable[[str, Opened], np.ndarray | None] | None = None,
    census: Census | None = None,
) -> Generator[RawSample, None, None]:
    """The raw samples of a shard in their order. Ends early where the shard cannot be read on, saying why in `problem`.

    A sample is a run of members with one key, by webdataset's rule for names (its key ends at the first dot after the last slash).
    Contents are read for samples whose index is wanted and members whose extension is; the rest is seeked over where the source can seek.
    `places` may know, from an index, where the samples begin: (samples + 1,) byte offsets. Then samples that are not wanted are not even
    looked at (their key is empty), and damage costs only the sample that it lies in.
    Names are names only: nothing is ever written or opened by them. A second member of the same name in a sample is ignored.
    """
    count = 0
    try:
        if scheme_of(url) == "table":
            from clipscale.data import tables

            for raw in tables.read(url, want, store or Store()):
                count += 1
                yield raw
            return
        opened = (store or Store()).open(url)
        with closing(opened.stream) as source:
            offsets = places(url, opened) if places is not None and seekable(source) else None
            if offsets is not None:
                samples = _read_places(url, source, offsets, want, extensions)
            else:
                samples = _read_on(url, source, want, extensions, census)
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
    extensions: Container[str] | None,
    census: Census | None,
) -> Generator[RawSample, None, None]:
    """Header by header."""
    index, key = -1, None
    members: dict[str, bytes] = {}
    wanted, start = False, 0
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
                if own != key:
                    if key is not None:
                        yield RawSample(url, key, index, members)
                    index, key, members = index + 1, own, {}
                    wanted = want(index)
                    if census is not None:
                        census.starts.append(start)
                if census is not None:
                    census.members[extension] += 1
                    census.sizes[extension] += size
                if wanted and extension not in members and (extensions is None or extension in extensions):
                    members[extension] = read_exactly(stream, size)
                    pass_over(stream, -size % BLOCK, can_seek)
                else:
                    pass_over(stream, size + -size % BLOCK, can_seek)
        except ERRORS as error:
            if index < 0 or isinstance(error, SourceError):
                raise
            raise _InsideError(error.args[0] if error.args else type(error).__name__) from error
        if key is not None:
            yield RawSample(url, key, index, members)
        if census is not None:
            census.starts.append(start)


def _read_places(
    url: str,
    source: Any,
    places: np.ndarray,
    want: Callable[[int], bool],
    extensions: Container[str] | None,
) -> Generator[RawSample, None, None]:
    """Sample by sample where the index says that they lie, each with one read."""
    for index in range(len(places) - 1):
        if not want(index):
            yield RawSample(url, "", index, {})
            continue
        source.seek(int(places[index]))
        extent = source.read(int(places[index + 1]) - int(places[index]))
        try:
            yield _sample_in(url, index, io.BytesIO(extent), extensions)
        except (tarfile.TarError, ValueError) as error:
            yield RawSample(url, "", index, {}, "damaged_sample", str(error))


def _sample_in(url: str, index: int, stream: io.BytesIO, extensions: Container[str] | None) -> RawSample:
    key = ""
    members: dict[str, bytes] = {}
    while (header := next_member(stream)) is not None:
        name, size = header
        named = key_and_extension(name)
        if named is not None:
            key, extension = key or named[0], named[1]
            if named[0] != key:
                raise tarfile.ReadError(f"two samples, {key!r} and {named[0]!r}, where the index has one")
            if extension not in members and (extensions is None or extension in extensions):
                members[extension] = read_exactly(stream, size)
                stream.seek(-size, os.SEEK_CUR)
        stream.seek(size + -size % BLOCK, os.SEEK_CUR)
    return RawSample(url, key, index, members)
