"""A shard's members, grouped into samples: the one rule by which training, the index and evaluation read shards."""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from clipscale.data.sample import key_and_extension
from clipscale.data.shards.tar import LARGEST_MEMBER, next_member, padded, read_exactly, skip


class Member(NamedTuple):
    """A member that belongs to a sample. Its content comes next in the archive's stream."""

    key: str
    extension: str
    name: str
    size: int


class Archive:
    """The members of a tar stream, from the first to the last. Content that nobody reads is skipped."""

    def __init__(self, stream: Any, can_seek: bool, most: int = LARGEST_MEMBER) -> None:
        """`can_seek`: skip by seeking. `most`: bytes of the largest member that is not damage."""
        self.stream = stream
        self.at = 0
        """Bytes of the archive before the headers of the present member; at the end, before the zeros that end it."""
        self.begun = False
        """Whether it has a sample, be it damaged."""
        self._can_seek = can_seek
        self._most = most
        self._unread = 0  # bytes of the present member, with what pads it

    def samples(self, stop: int | None = None) -> Iterator[tuple[str, Iterator[Member]]]:
        """Each sample's key and members: a run of members with one key. A sample's members must be taken before the
        next sample is. `stop`: where the last of them ends (None: with the archive).

        Raises tarfile.TarError and others of `tar.DAMAGE`.
        """
        return groupby(self._members(stop), key=itemgetter(0))

    def _members(self, stop: int | None) -> Iterator[Member]:
        while stop is None or self.at < stop:
            header = next_member(self.stream, self._most)
            if header is None:
                return
            name, size, taken = header
            self._unread = padded(size)
            following = self.at + taken + self._unread
            named = key_and_extension(name)
            if named is not None:
                self.begun = True
                yield Member(*named, name, size)
            skip(self.stream, self._unread, self._can_seek)
            self.at = following

    def read(self, member: Member, most: int = LARGEST_MEMBER) -> bytes:
        """The present member's content. Raises tarfile.ReadError if it is cut off, or has more than `most` bytes."""
        content = read_exactly(self.stream, member.size, most)
        self._unread -= member.size
        return content

    def seek(self, at: int) -> None:
        """Go on with the headers at that byte."""
        self.stream.seek(at)
        self.at = at
