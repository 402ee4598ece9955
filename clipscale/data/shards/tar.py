"""The tar format: POSIX.1-2001 ustar and pax, GNU long names; packed or not, from a stream that need not seek.

The standard library's tar reader takes eight times as long for small members, as long as decoding a 256-pixel JPEG, so the few parts of
the format that archives of plain files use are read here.
"""

import bz2
import gzip
import io
import lzma
import os
import tarfile
from collections.abc import Callable
from typing import Any

BLOCK = 512
LARGEST_MEMBER = 1 << 28
"""A header that claims more than this many bytes is taken for damage; nothing of that size is a picture."""

LARGEST_HEADER = 1 << 20
XZ_MEMORY = 128 << 20
"""What unpacking xz may take; `xz -9` asks for 65 MiB."""


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
            content = read_exactly(stream, size, LARGEST_HEADER)
            read_exactly(stream, -size % BLOCK)
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
            pass_over(stream, size + -size % BLOCK, False)


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
    at = 0
    while at < len(content):
        space = content.find(b" ", at, at + 20)
        length = int(content[at:space]) if space >= 0 else 0
        if length <= 0 or not space < at + length <= len(content):
            raise tarfile.ReadError("bad record in an extended header")
        key, _, value = content[space + 1 : at + length - 1].partition(b"=")
        fields[_text(key)] = value.decode("utf-8", "surrogateescape")
        at += length
    return fields


def read_exactly(stream: Any, size: int, most: int = LARGEST_MEMBER) -> bytes:
    """So many bytes and not fewer. Raises tarfile.ReadError."""
    if not 0 <= size <= most:
        raise tarfile.ReadError(f"a member claims {size} bytes")
    data = stream.read(size)
    if len(data) < size:
        raise tarfile.ReadError("ends within a member")
    return data


def pass_over(stream: Any, size: int, seekable: bool) -> None:
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


class Stretch:
    """Bytes start..stop of a stream that can seek, as a stream."""

    def __init__(self, source: Any, start: int, stop: int) -> None:
        self._source, self._at, self._stop = source, start, stop

    def read(self, size: int) -> bytes:
        self._source.seek(self._at)
        data: bytes = self._source.read(max(0, min(size, self._stop - self._at)))
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int) -> None:
        assert whence == os.SEEK_CUR, "from here only"
        self._at += offset


class _Unxz(io.RawIOBase):
    """What an xz stream unpacks to. As lzma.LZMAFile, whose dictionary may be as large as the file likes."""

    def __init__(self, source: Any) -> None:
        self._source, self._packed, self._decoder = source, b"", lzma.LZMADecompressor(memlimit=XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._decoder.eof:  # another stream may follow, or padding
                self._packed = (self._decoder.unused_data or self._source.read(1 << 16)).lstrip(b"\0")
                if not self._packed:
                    return 0
                self._decoder = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
            if self._decoder.needs_input and not self._packed:
                self._packed = self._source.read(1 << 16)
                if not self._packed:
                    raise EOFError("ends within a packed stream")
            data = self._decoder.decompress(self._packed, len(buffer))
            self._packed = b""
            if data:
                buffer[: len(data)] = data
                return len(data)


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
    (b"\xfd7zXZ\0", lambda stream: io.BufferedReader(_Unxz(stream), 1 << 16)),
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
