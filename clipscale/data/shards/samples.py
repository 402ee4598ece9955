"""Reads the raw samples of a whole shard in their order: a tar file header by header, or by an index."""

import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from clipscale.data.sample import RawSample
from clipscale.data.shards import index
from clipscale.data.shards.addresses import SourceError
from clipscale.data.shards.archive import Archive, Member
from clipscale.data.shards.store import Store
from clipscale.data.shards.tar import DAMAGE, unpacked


@dataclass
class ReadProblem:
    """Why the rest of a shard could not be read; the reader fills it in."""

    reason: str | None = None
    detail: str = ""

    def note(self, url: str, error: Exception, reason: str) -> None:
        """`reason`: of an error that does not name its own."""
        self.reason = getattr(error, "reason", reason)
        self.detail = f"{url}: {getattr(error, 'strerror', None) or str(error) or type(error).__name__}"


Want = Callable[[int], bool]
Kinds = Mapping[str, int] | None


def read_samples(
    url: str, problem: ReadProblem, want: Want, kinds: Kinds, store: Store, *, indexed: bool = False
) -> Generator[RawSample, None, None]:
    """The samples of a shard, as `read_shard` gives those of a run."""
    archive: Archive | None = None
    try:
        source, state = store.open(url)
        with closing(source):
            offsets = index.sample_offsets(url, state) if indexed and source.seekable() else None
            if offsets is not None:
                archive = Archive(source, can_seek=True)
                yield from _by_offsets(url, archive, offsets, want, kinds)
                return
            stream, can_seek = unpacked(source)
            archive = Archive(stream, can_seek)
            yield from _one_by_one(url, archive, want, kinds)
            if can_seek and archive.at > state[0]:
                raise tarfile.ReadError("ends within a member")
            while not source.seekable() and source.read(1 << 20):
                pass  # a command's failure shows at its end
    except (SourceError, *DAMAGE) as error:
        problem.note(url, error, "truncated_shard" if archive and archive.begun else "unreadable_shard")


def _one_by_one(url: str, archive: Archive, want: Want, kinds: Kinds) -> Iterator[RawSample]:
    for number, (key, members) in enumerate(archive.samples()):
        first = archive.at
        sample = RawSample(url, key, number, {})
        if want(number):
            _read(sample, archive, members, kinds)
        for _ in members:  # the rest is skipped, which leads to the next sample
            pass
        sample.extent = archive.at - first
        yield sample


def _by_offsets(url: str, archive: Archive, offsets: np.ndarray, want: Want, kinds: Kinds) -> Iterator[RawSample]:
    for number, (start, stop) in enumerate(pairwise(offsets.tolist())):
        sample = RawSample(url, "", number, {}, extent=stop - start)
        if want(number):
            try:
                archive.seek(start)
                for key, members in archive.samples(stop):
                    if sample.key:
                        raise tarfile.ReadError(f"a member of {key!r} is not of this sample")
                    sample.key = key
                    _read(sample, archive, members, kinds)
                if archive.at > stop:
                    raise tarfile.ReadError("its last member goes on in the next sample")
            except (tarfile.TarError, ValueError) as error:
                sample = RawSample(url, "", number, {}, "damaged_sample", str(error), sample.extent)
        yield sample


def _read(sample: RawSample, archive: Archive, members: Iterable[Member], kinds: Kinds) -> None:
    for member in members:
        if sample.accepts(member.name, member.extension, member.size, kinds):
            sample.members[member.extension] = archive.read(member)
