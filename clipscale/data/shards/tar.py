"""The tar format: ustar, pax and GNU long names, packed or not, from streams with or without seeking.

Reads only what archives of plain files use: the standard library's reader takes eight times as long for small members,
as long as decoding a 256-pixel JPEG.
"""

import bz2
import gzip
import io
import lzma
import os
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

BLOCK = 512
LARGEST_MEMBER = 1 << 28
"""A header that claims more bytes is damaged: no picture is that large."""
LARGEST_HEADER = 1 << 20
"""Limit of an extended header, which is held in memory."""
XZ_MEMORY = 128 << 20
"""Memory limit of the xz decoder; `xz -9` needs 65 MiB."""
MOST_EXPANSION, FREE_BYTES = 200, 1 << 26
"""A packed shard may unpack to so many times what has been read of it, and to so many bytes more. One-letter texts pack
sixty to one, zeros in bzip2 twenty thousand to one."""
PIECE = 1 << 16
"""Bytes read at a time from a stream that is unpacked or cannot seek."""


def next_member(stream: Any, most: int = LARGEST_MEMBER) -> tuple[str, int] | None:
    """Name and size of the next plain file, or None at the end of the archive; leaves the stream at the file's content.

    Raises tarfile.TarError for damage, and for a member of more than `most` bytes.
    """
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
        if kind in b"LxK":  # a long name or extended fields for the next header
            content = read_exactly(stream, size, LARGEST_HEADER)
            read_exactly(stream, -size % BLOCK)
            if kind == b"L":
                long_name = _text(content)
            elif kind == b"x":
                fields = _pax(content)
                long_name = fields.get("path", long_name)
                long_size = int(fields["size"]) if "size" in fields else None
            continue
        if (name := long_name) is None:
            name = _text(block[:100])
            if block[257:263] == b"ustar\0" and block[345]:
                name = f"{_text(block[345:500])}/{name}"
        size = size if long_size is None else long_size
        if kind in b"0\x007" and not name.endswith("/"):
            if not 0 <= size <= most:
                raise tarfile.ReadError(f"member {name!r} claims {size} bytes")
            return name, size
        long_name = long_size = None
        if kind not in b"123456":  # links, devices and folders have no content, whatever their size field says
            skip(stream, size + -size % BLOCK, False)


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # base 256, for what octal digits cannot hold
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    return int(digits, 8) if digits else 0


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pax(content: bytes) -> dict[str, str]:
    """Records of the form `LENGTH KEY=VALUE\\n`."""
    fields, at = {}, 0
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
    """Exactly `size` bytes. Raises tarfile.ReadError if there are fewer or `size` is over `most`."""
    if not 0 <= size <= most:
        raise tarfile.ReadError(f"a member claims {size} bytes")
    data = stream.read(size)
    if len(data) < size:
        raise tarfile.ReadError("ends within a member")
    return data


def skip(stream: Any, size: int, can_seek: bool) -> None:
    """Skip `size` bytes, by reading them where the stream cannot seek. Raises tarfile.ReadError."""
    if can_seek:
        stream.seek(size, os.SEEK_CUR)
        return
    while size > 0:
        got = len(stream.read(min(size, 1 << 20)))
        if not got:
            raise tarfile.ReadError("ends within a member")
        size -= got


class CountedStream:
    """Counts and optionally hashes the bytes of a stream; a hashed stream is read to its end and never seeks."""

    def __init__(self, source: Any, hasher: Any = None) -> None:
        self._source, self._hasher, self.at = source, hasher, 0

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._source.read(size)
        self.at += len(data)
        if self._hasher is not None:
            self._hasher.update(data)
        return data

    def seekable(self) -> bool:
        return self._hasher is None and seekable(self._source)

    def seek(self, offset: int, whence: int = os.SEEK_CUR) -> int:
        assert whence == os.SEEK_CUR, "forward only"
        self._source.seek(offset, whence)
        self.at += offset
        return self.at

    def close(self) -> None:
        """Close the source, after reading the rest of it if it is hashed."""
        try:
            while self._hasher is not None and self.read(1 << 20):
                pass
        finally:
            self._source.close()


def seekable(stream: Any) -> bool:
    """Whether the stream can seek."""
    return hasattr(stream, "seekable") and bool(stream.seekable())


class ByteRange:
    """Bytes start..stop of a seekable stream, as a stream."""

    def __init__(self, source: Any, start: int, stop: int) -> None:
        self._source, self._at, self._stop = source, start, stop

    def read(self, size: int) -> bytes:
        self._source.seek(self._at)
        data: bytes = self._source.read(max(0, min(size, self._stop - self._at)))
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int) -> None:
        assert whence == os.SEEK_CUR, "relative seeks only"
        self._at += offset


class _Pieces(io.RawIOBase):
    """The pieces of an iterator as a stream."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._left = pieces, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left and (piece := next(self._pieces, None)) is not None:
            self._left = piece
        data, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


def _unpacked_xz(source: Any) -> Iterator[bytes]:
    """The content of xz streams, one after another. lzma.LZMAFile would allow a dictionary of any size."""
    packed = source.read(PIECE)
    while packed:
        decoder = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
        while not decoder.eof:
            if decoder.needs_input and not packed and not (packed := source.read(PIECE)):
                raise EOFError("ends within a packed stream")
            yield decoder.decompress(packed, PIECE)
            packed = b""
        packed = (decoder.unused_data or source.read(PIECE)).lstrip(b"\0")  # another stream, or padding


_MAGICS: tuple[tuple[bytes, Callable[[Any], Any]], ...] = (
    (b"\x1f\x8b", lambda stream: gzip.GzipFile(fileobj=stream)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\0", lambda stream: io.BufferedReader(_Pieces(_unpacked_xz(stream)), PIECE)),
)


def unpacked(source: Any) -> tuple[Any, bool]:
    """A stream of the archive, and whether the source is packed. Raises tarfile.ReadError if it is empty."""
    first = source.read(6)
    if not first:
        raise tarfile.ReadError("empty")
    if seekable(source):
        source.seek(0)
        stream = source
    else:
        stream = io.BufferedReader(_Pieces(chain([first], iter(partial(source.read, PIECE), b""))), PIECE)
    for magic, opened in _MAGICS:
        if first.startswith(magic):
            packed = CountedStream(stream)
            return _Unpacked(opened(packed), packed), True
    return stream, False


class _Unpacked:
    """What a decoder unpacks, as long as it is in proportion to what was packed. Raises tarfile.ReadError beyond."""

    def __init__(self, content: Any, packed: CountedStream) -> None:
        self._content, self._packed, self._at = content, packed, 0

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._content.read(size)
        self._at += len(data)
        if self._at > FREE_BYTES + MOST_EXPANSION * self._packed.at:
            raise tarfile.ReadError(f"unpacks to more than {MOST_EXPANSION} times its size")
        return data

    def close(self) -> None:
        self._content.close()
