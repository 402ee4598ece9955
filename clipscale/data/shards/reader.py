"""Reads the samples of a shard: consecutive members of a tar file with the same key. Training, the index and evaluation
all read shards by this file.

With `data.only_keys` or `data.sample_weights` a shard has only the samples that a file lists (`subset.py`).
"""

import math
import os
import tarfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from clipscale.data.addresses import basename
from clipscale.data.sample import (
    MAX_NAME_BYTES,
    MAX_TEXT_BYTES,
    RawSample,
    key_and_extension,
)
from clipscale.data.shards.requests import ObjectState, SourceError
from clipscale.data.shards.store import Store
from clipscale.data.shards.subset import Subset
from clipscale.data.shards.tar import (
    DAMAGE,
    MAX_HEADER_BYTES,
    MAX_SAMPLE_SPAN,
    Stream,
    check_end,
    next_member,
    normalise_name,
    open_archive,
    padded_size,
    read_exactly,
    skip,
)

# Most links that are followed from one to the next.
MAX_LINKS = 8
# Most names of an archive that are remembered, to look up links.
MAX_CONTENTS = 1 << 18
NO_LINKS = "`tar -h --hard-dereference` stores files in the place of links; this one"
# Characters of an error's text: it may hold a member's name or a server's answer.
MAX_DETAIL_LENGTH = 400


class Member(NamedTuple):
    """A member of a sample. Its content follows in the archive's stream; a link's content lies elsewhere in it."""

    # The sample's number among those that this archive has given.
    sample: int
    key: str
    extension: str
    name: str
    size: int
    # For a link: the offset of its content.
    offset: int | None = None
    # For a link: why its content cannot be read; empty if it can.
    link_error: str = ""


class Content(NamedTuple):
    """A file's content in an archive."""

    offset: int
    size: int


class Archive:
    """The members of a tar stream, from first to last. Unread content is skipped."""

    def __init__(self, stream: Stream, can_seek: bool) -> None:
        """`can_seek`: skip by seeking."""
        self.stream = stream
        # Offset of the current member's first header; at the end, of the zeros that end the archive.
        self.offset = 0
        # Samples begun, damaged or not.
        self.samples_begun = 0
        self._can_seek = can_seek
        self._unread = 0  # unread bytes of the current member, with its padding

    def samples(self) -> Iterator[tuple[str, Iterator[Member]]]:
        """Each sample's key and members. Read the members before the next sample.

        A sample begins with another key, and where the first member's extension comes again. Raises the errors of
        `tar.DAMAGE`.
        """
        for (_, key), members in groupby(self._members(), key=itemgetter(0, 1)):
            yield key, members

    def _members(self) -> Iterator[Member]:
        key = ""
        first_extension = ""
        start = self.offset  # of the sample
        header_bytes = 0  # since the sample's first header, which does not count
        while (header := next_member(self.stream)) is not None:
            self._unread = padded_size(header.size)
            next_offset = self.offset + header.bytes_before + self._unread
            key_extension = key_and_extension(header.name)
            if key_extension is not None and (key_extension[0] != key or key_extension[1] == first_extension):
                key, first_extension = key_extension
                start = self.offset
                header_bytes = 0
                self.samples_begun += 1
            else:
                header_bytes += header.header_bytes
            _check_span(next_offset - start, header_bytes)
            if key_extension is not None:
                member = Member(self.samples_begun, *key_extension, header.name, header.size)
                yield member if header.target is None else self._link(member, header.target)
            skip(self.stream, self._unread, self._can_seek)
            self.offset = next_offset

    def read(self, member: Member) -> bytes:
        """The current member's content. Raises tarfile.ReadError if the file ends within it."""
        if member.offset is not None:
            with self._elsewhere(member.offset):
                return read_exactly(self.stream, member.size)
        content = read_exactly(self.stream, member.size)
        self._unread -= member.size
        return content

    def content_offset(self, member: Member) -> int:
        """The offset of the current member's content. Call it before reading any of the content."""
        return int(self.stream.tell()) if member.offset is None else member.offset

    def _link(self, member: Member, target: str) -> Member:
        """The member with what it links to."""
        if not self._can_seek:
            return member._replace(link_error=f"{NO_LINKS} is in a gzipped tar")
        found: Content | str | None = target
        for _ in range(MAX_LINKS):
            if not isinstance(found, str):
                break
            found = self._contents.get(found)
        if not isinstance(found, Content):
            shown = target[:MAX_DETAIL_LENGTH]
            return member._replace(
                link_error=f"{NO_LINKS} leads to {shown}, which is missing from this tar or in it twice"
            )
        return member._replace(offset=found.offset, size=found.size)

    @cached_property
    def _contents(self) -> dict[str, "Content | str | None"]:
        """Name of a member -> its file, or the name that it links to; None if several members have the name.

        Reads up to the archive's end or its first damage. A file that is cut off is left out.
        """
        contents: dict[str, Content | str | None] = {}
        with self._elsewhere(0):
            end = self.stream.seek(0, os.SEEK_END)
        offset = 0
        with self._elsewhere(0), suppress(tarfile.TarError, ValueError, EOFError):
            while len(contents) < MAX_CONTENTS:
                header = next_member(self.stream)
                if header is None:
                    break
                offset += header.bytes_before
                is_whole = offset + header.size <= end
                longest_name = max(len(header.name), len(header.target or ""))
                if is_whole and longest_name <= MAX_NAME_BYTES:
                    name = normalise_name(header.name)
                    content = header.target or Content(offset, header.size)
                    contents[name] = None if name in contents else content
                skip(self.stream, padded_size(header.size), True)
                offset += padded_size(header.size)
        return contents

    @contextmanager
    def _elsewhere(self, offset: int) -> Iterator[None]:
        """Reads at this offset, and then goes back."""
        here = self.stream.tell()
        self.stream.seek(offset)
        yield
        self.stream.seek(here)

    def seek(self, offset: int) -> None:
        """Continue at the member that begins with a header at this offset."""
        self.stream.seek(offset)
        self.offset = offset


def _check_span(num_bytes: int, header_bytes: int) -> None:
    """Raise tarfile.ReadError if there is too much from one sample to the next."""
    if num_bytes > MAX_SAMPLE_SPAN or header_bytes > MAX_HEADER_BYTES:
        raise tarfile.ReadError(f"{num_bytes} bytes from one sample to the next, {header_bytes} of headers")


@dataclass
class ReadFailure:
    """Why the rest of a shard could not be read; `read_shard` fills it in. Without a reason it was read to its end."""

    reason: str | None = None
    detail: str = ""
    error: Exception | None = None

    def note(self, url: str, error: Exception, reason: str) -> None:
        """Set the fields by an error. `reason`: for an error without a reason of its own."""
        self.error = error
        self.reason = getattr(error, "reason", reason)
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        self.detail = f"{url}: {why[:MAX_DETAIL_LENGTH]}"


@dataclass
class OpenShard:
    """A shard that is being read: its samples, one after another."""

    url: str
    archive: Archive
    store: Store
    # Extension of a member to read -> its size limit; None to read all members.
    size_limits: Mapping[str, int] | None
    # Whether each sample keeps its json member, wanted or not, as `RawSample.json_bytes`.
    keeps_json: bool = False
    # Bytes before this offset are counted in `num_bytes` of earlier samples.
    counted_until: int = 0

    def samples(self) -> Iterator[tuple[str, Iterator[Member]]]:
        """Yields what `Archive.samples` yields. A server has a time for each sample."""
        samples = self.archive.samples()
        while True:
            self.store.begin_sample()
            sample = next(samples, None)
            if sample is None:
                return
            yield sample

    def seek(self, offset: int) -> None:
        """Go on with the sample that begins at this offset; for new `samples`."""
        self.archive.seek(offset)
        self.counted_until = offset

    def read(self, sample: RawSample, members: Iterator[Member], wanted: bool) -> None:
        """Fill in the sample: its size, and if it is `wanted`, the members that have a size limit."""
        size_limits = self.size_limits if wanted else {}
        dotted = []
        for member in members:
            if "." in member.extension:
                dotted.append(member.extension)
            if member.offset is not None:
                sample.link_bytes += padded_size(member.size)
            is_admitted = sample.admit(member.name, member.extension, member.size, size_limits, member.link_error)
            is_readable_json = member.extension == "json" and member.size <= MAX_TEXT_BYTES and not member.link_error
            is_kept_json = self.keeps_json and is_readable_json and not sample.json_bytes
            if is_admitted or is_kept_json:
                content = self.archive.read(member)
            if is_admitted:
                sample.members[member.extension] = content
            if is_kept_json:
                sample.json_bytes = content
        if dotted and size_limits:
            sample.note_dotted_extensions(dotted, size_limits)
        sample.num_bytes = self.archive.offset - self.counted_until + sample.link_bytes
        self.counted_until = self.archive.offset


def all_samples(shard: OpenShard, reads_content: Callable[[int], bool]) -> Iterator[RawSample]:
    """Every sample, with its content if `reads_content` accepts its index."""
    for number, (key, members) in enumerate(shard.samples()):
        sample = RawSample(shard.url, key, number, {})
        shard.read(sample, members, reads_content(number))
        yield sample


def indexed_samples(
    shard: OpenShard, reads_content: Callable[[int], bool], offsets: Sequence[int]
) -> Iterator[RawSample]:
    """The samples of an indexed shard. `offsets`: where each sample begins, then where the last one ends.

    Samples that `reads_content` does not accept are skipped, and have no key.
    """
    samples = shard.samples()
    for number, (start, stop) in enumerate(pairwise(offsets)):
        if not reads_content(number):
            yield RawSample(shard.url, "", number, {}, num_bytes=stop - start)
            continue
        if shard.archive.offset != start:
            shard.seek(start)
            samples = shard.samples()
        sample_members = next(samples, None)
        if sample_members is None:
            return
        key, members = sample_members
        sample = RawSample(shard.url, key, number, {})
        shard.read(sample, members, wanted=True)
        if sample.link_bytes or shard.archive.offset != stop:
            sample.mark_unusable("outdated_index", "it is an earlier version's; run `clipscale data index` again")
        yield sample


def listed_samples(shard: OpenShard, reads_content: Callable[[int], bool], subset: Subset) -> Iterator[RawSample]:
    """The samples that a subset lists. A sample comes once for each time that it may be in an epoch.

    Its bytes count once. A sample that comes several times is always read, since its later copies may belong to another
    window.
    """
    number = 0
    for key, members in shard.samples():
        sample = RawSample(shard.url, key, number, {})
        wanted = reads_content(number) or subset.may_repeat(key)
        shard.read(sample, members, wanted)
        weight = subset.weight(key, sample.json_bytes)
        for times in range(math.ceil(weight)):
            yield replace(
                sample,
                index=number,
                num_bytes=0 if times else sample.num_bytes,
                repeat=times,
                keep_probability=weight - times,
                json_bytes=b"",
            )
            number += 1


def read_shard(
    url: str,
    failure: ReadFailure,
    reads_content: Callable[[int], bool] = lambda _: True,
    size_limits: Mapping[str, int] | None = None,
    *,
    store: Store | None = None,
    subset: Subset | None = None,
    offsets: Callable[[str, ObjectState], np.ndarray | None] = lambda url, state: None,
) -> Generator[RawSample, None, None]:
    """The raw samples of a shard. Where the shard cannot be read further, ends early and fills in `failure`.

    Args:
        reads_content: takes a sample's index; whether its content is read.
        size_limits: content is read for these members (see `size_limits_of`); None for all.
        subset: the shard then has only the samples that it lists. One of weight 2.5 comes as three copies, the third
            with a probability of 0.5.
        offsets: returns the samples' offsets (see `index.sample_offsets`). Unwanted samples are then skipped.

    A damaged sample has no members, and one of these reasons:

    - `dot_in_key`: its pictures have further dots in their names, so the key has ended before their suffix.
    - `repeated_member`: an extension comes twice. If it is the first member's, it begins another sample instead.
    - `link`: a link leads out of the tar. Other links give what they stand for.
    - `too_large`: a member to read is over its size limit.
    - `outdated_index`: the index does not say where the sample ends, or is an earlier version's.

    Members' names are never used as paths.
    """
    archive: Archive | None = None
    store = store or Store()
    try:
        source, state = store.open(url)
        with closing(source):
            stream, can_seek = open_archive(source, basename(url))
            archive = Archive(stream, can_seek)
            keeps_json = subset is not None and subset.table.has_uids
            shard = OpenShard(url, archive, store, size_limits, keeps_json)
            indexed_offsets = offsets(url, state) if can_seek and subset is None else None
            starts = [] if indexed_offsets is None else indexed_offsets.tolist()
            if subset is not None:
                yield from listed_samples(shard, reads_content, subset)
            elif starts:
                yield from indexed_samples(shard, reads_content, starts)
            else:
                yield from all_samples(shard, reads_content)
            # A seek over the content goes past a cut-off end unnoticed.
            if can_seek and archive.offset >= state.size:
                raise tarfile.ReadError("ends without the zeros that end an archive: it may have been cut off")
            if not starts:
                check_end(stream)
    except (SourceError, *DAMAGE) as error:
        has_samples = archive is not None and archive.samples_begun > 0
        failure.note(url, error, "truncated_shard" if has_samples else "unreadable_shard")
