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
from collections.abc import Callable, Container, Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from webdataset.gopen import gopen
from webdataset.tariterators import base_plus_ext

_META = re.compile(r"__[^/]*__($|/)")
"""Members that webdataset keeps for itself."""


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


def read_shard(
    url: str,
    problem: ReadProblem,
    want: Callable[[int], bool] = lambda _: True,
    extensions: Container[str] | None = None,
) -> Generator[RawSample, None, None]:
    """The raw samples of a shard in their order. Ends early where the shard cannot be read on, saying why in `problem`.

    A sample is a run of members with one key, by webdataset's rule for names (its key ends at the first dot after the last slash).
    Contents are read for samples whose index is wanted and members whose extension is; the rest is seeked over where the source can seek.
    Names are names only: nothing is ever written or opened by them. A second member of the same name in a sample is ignored.
    """
    index, key = -1, None
    members: dict[str, bytes] = {}
    wanted = False
    try:
        with closing(gopen(url)) as source, closing(_plain(source)) as stream:
            seekable = hasattr(stream, "seekable") and stream.seekable()
            while (header := next_member(stream)) is not None:
                name, size = header
                own, extension = base_plus_ext(name)
                if own is None or _META.match(name):
                    _pass_over(stream, size + -size % BLOCK, seekable)
                    continue
                if own != key:
                    if key is not None:
                        yield RawSample(url, key, index, members)
                    index, key, members = index + 1, own, {}
                    wanted = want(index)
                extension = extension.lower()
                if wanted and extension not in members and (extensions is None or extension in extensions):
                    members[extension] = _read_exactly(stream, size)
                    _pass_over(stream, -size % BLOCK, seekable)
                else:
                    _pass_over(stream, size + -size % BLOCK, seekable)
            if key is not None:
                yield RawSample(url, key, index, members)
    except (tarfile.TarError, OSError, EOFError, ValueError, ArithmeticError, zlib.error, lzma.LZMAError) as error:
        problem.reason = "unreadable_shard" if index < 0 else "truncated_shard"
        problem.detail = f"{url}: {error.args[0] if error.args else type(error).__name__}"


# -- the tar format (POSIX.1-2001 ustar and pax; GNU long names) -------------------------------------------------------

BLOCK = 512
LARGEST_MEMBER = 1 << 30
"""A header that claims more than this many bytes is taken for damage; nothing of that size is a picture."""


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
            content = _read_exactly(stream, size)
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


def _read_exactly(stream: Any, size: int) -> bytes:
    if size > LARGEST_MEMBER:
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


def _plain(source: Any) -> Any:
    """The uncompressed bytes of a stream, whatever it is packed with. Raises tarfile.ReadError if it is empty."""
    first = source.read(6)
    if not first:
        raise tarfile.ReadError("empty")
    if hasattr(source, "seekable") and source.seekable():
        source.seek(0)
        stream = source
    else:
        stream = io.BufferedReader(_Rejoined(first, source), 1 << 16)
    for magic, opened in _MAGICS:
        if first.startswith(magic):
            return opened(stream)
    return stream
