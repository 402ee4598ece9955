"""What is inside a shard: its raw samples in their order, and the tar format underneath.

The standard library's tar reader takes eight times as long for small members, as long as decoding a 256-pixel JPEG, so the few parts of
the format that archives of plain files use are read here.
"""

import bz2
import gzip
import io
import lzma
import os
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Container, Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clipscale.data.sources import Opened, SourceError, Store, scheme_of

_META = re.compile(r"__[^/]*__($|/)")
"""Members that webdataset keeps for itself."""
_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
"""Key and extension by webdataset's rule: the key ends at the first dot after the last slash."""


@dataclass
class ReadProblem:
    """Why the rest of a shard could not be read; filled by `read_shard`."""

    reason: str | None = None
    detail: str = ""


@dataclass
class RawSample:
    """The members of one sample as they lie in the shard: extension (lower case) -> bytes."""

    url: str
    key: str
    index: int
    members: dict[str, bytes] = field(repr=False)
    damage: str = ""
    """The reason why this sample cannot be used although its shard can be read on."""
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


def key_and_extension(name: str) -> tuple[str, str] | None:
    """The sample and the kind that a member's name says, or None where it says none."""
    match = None if _META.match(name) else _NAME.match(name)
    return (match[1], match[2].lower()) if match else None


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
                    _pass_over(stream, size + -size % BLOCK, can_seek)
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
                    members[extension] = _read_exactly(stream, size)
                    _pass_over(stream, -size % BLOCK, can_seek)
                else:
                    _pass_over(stream, size + -size % BLOCK, can_seek)
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
                members[extension] = _read_exactly(stream, size)
                stream.seek(-size, os.SEEK_CUR)
        stream.seek(size + -size % BLOCK, os.SEEK_CUR)
    return RawSample(url, key, index, members)


# -- the tar format (POSIX.1-2001 ustar and pax; GNU long names) -------------------------------------------------------

BLOCK = 512
LARGEST_MEMBER = 1 << 28
"""A header that claims more than this many bytes is taken for damage; nothing of that size is a picture."""

LARGEST_HEADER = 1 << 20


def next_member(stream: Any) -> tuple[str, int] | None:
    """Name and size of the next plain file, the stream standing at its content; None at the end. Raises tarfile.TarError for damage."""
    long_name: str | None = None
    long_size: int | None = None
    while True:
        block = stream.read(BLOCK)
        if not block or block.count(0) == BLOCK:
            return None
        if len(block) < BLOCK:
            raise tarfile.ReadError("ends within a header")
        if _number(block[148:156]) != sum(block) - sum(block[148:156]) + 256:
            raise tarfile.ReadError("bad checksum in a header")
        size, kind = _number(block[124:136]), block[156:157]
        if kind in b"LxK":  # what the next header should have said, as content
            content = _read_exactly(stream, size, LARGEST_HEADER)
            _read_exactly(stream, -size % BLOCK)
            if kind == b"L":
                long_name = _text(content)
            elif kind == b"x":
                fields = _pax(content)
                long_name = fields.get("path", long_name)
                long_size = int(fields["size"]) if "size" in fields else None
            continue
        name = long_name
        if name is None:
            name = _text(block[:100])
            if block[257:263] == b"ustar\0" and block[345]:
                name = f"{_text(block[345:500])}/{name}"
        size = size if long_size is None else long_size
        if kind in b"0\x007" and not name.endswith("/"):
            if not 0 <= size <= LARGEST_MEMBER:
                raise tarfile.ReadError(f"member {name!r} claims {size} bytes")
            return name, size
        long_name = long_size = None
        if kind not in b"123456":  # links, devices and folders have no content, whatever their size field says
            _pass_over(stream, size + -size % BLOCK, False)


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # base 256, for what octal digits cannot hold
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    return int(digits, 8) if digits else 0


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pax(content: bytes) -> dict[str, str]:
    """Records of the form `LENGTH KEY=VALUE\\n`."""
    fields = {}
    while content:
        length = int(content.split(b" ", 1)[0])
        if not 0 < length <= len(content):
            raise tarfile.ReadError("bad record in an extended header")
        key, _, value = content[:length].split(b" ", 1)[1][:-1].partition(b"=")
        fields[_text(key)] = value.decode("utf-8", "surrogateescape")
        content = content[length:]
    return fields


def _read_exactly(stream: Any, size: int, most: int = LARGEST_MEMBER) -> bytes:
    if not 0 <= size <= most:
        raise tarfile.ReadError(f"a member claims {size} bytes")
    data = stream.read(size)
    if len(data) < size:
        raise tarfile.ReadError("ends within a member")
    return data


def _pass_over(stream: Any, size: int, seekable: bool) -> None:
    """Skip so many bytes."""
    if seekable:
        stream.seek(size, os.SEEK_CUR)
        return
    while size > 0:
        got = len(stream.read(min(size, 1 << 20)))
        if not got:
            raise tarfile.ReadError("ends within a member")
        size -= got


class Metered:
    """A stream that is read on, its bytes counted and, for a checksum, hashed; hashed ones are read where others would be skipped."""

    def __init__(self, source: Any, digest: Any = None) -> None:
        self._source, self._digest, self.at = source, digest, 0

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._source.read(size)
        self.at += len(data)
        if self._digest is not None:
            self._digest.update(data)
        return data

    def seekable(self) -> bool:
        return self._digest is None and seekable(self._source)

    def seek(self, offset: int, whence: int = os.SEEK_CUR) -> int:
        assert whence == os.SEEK_CUR, "forward only"
        self._source.seek(offset, whence)
        self.at += offset
        return self.at

    def close(self) -> None:
        """Close the source; the checksum is of the whole, so what is left of it is read first."""
        try:
            while self._digest is not None and self.read(1 << 20):
                pass
        finally:
            self._source.close()


def seekable(stream: Any) -> bool:
    """Whether the stream can go to another place."""
    return hasattr(stream, "seekable") and bool(stream.seekable())


class _Rejoined(io.RawIOBase):
    """A stream whose first bytes have been looked at."""

    def __init__(self, first: bytes, rest: Any) -> None:
        self._first, self._rest = first, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._first[: len(buffer)] or self._rest.read(len(buffer))
        self._first = self._first[len(data) :]
        buffer[: len(data)] = data
        return len(data)


_MAGICS: tuple[tuple[bytes, Callable[[Any], Any]], ...] = (
    (b"\x1f\x8b", lambda stream: gzip.GzipFile(fileobj=stream)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\0", lzma.LZMAFile),
)


def unpacked(source: Any) -> Any:
    """The uncompressed bytes of a stream, whatever it is packed with. Raises tarfile.ReadError if it is empty."""
    first = source.read(6)
    if not first:
        raise tarfile.ReadError("empty")
    if seekable(source):
        source.seek(0)
        stream = source
    else:
        stream = io.BufferedReader(_Rejoined(first, source), 1 << 16)
    for magic, opened in _MAGICS:
        if first.startswith(magic):
            return opened(stream)
    return stream
