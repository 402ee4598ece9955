"""The tar format: ustar, pax and GNU long names, plain or gzipped, from streams with or without seeking.

Reads only what archives of plain files use. The standard library's reader is eight times as slow for small members: it
takes as long as decoding a JPEG of 256 pixels.
"""

import gzip
import io
import os
import posixpath
import shlex
import tarfile
import zlib
from contextlib import suppress
from typing import NamedTuple, Protocol

from clipscale.data.content import describe_content
from clipscale.data.hashing import utf8

BLOCK_BYTES = 512
# The exceptions that reading a damaged archive may raise.
DAMAGE = (tarfile.TarError, OSError, EOFError, ValueError, ArithmeticError, zlib.error)
# Most bytes of a member: no picture is larger, so a header that claims more is damaged.
MAX_MEMBER_BYTES = 1 << 28
# Most bytes of the extended headers before a file: they are held in memory.
MAX_EXTENDED_HEADER_BYTES = 1 << 20
# Most bytes of all headers before a file, and of a sample's headers after its first file. A million take seconds.
MAX_HEADER_BYTES = 1 << 23
# Most bytes from the start of one sample to the start of the next: a hostile server may send folders without end.
MAX_SAMPLE_SPAN = 1 << 30
# Bytes after the end of an archive that are checked: GNU tar pads an archive with zeros, usually to 10,240 bytes.
MAX_END_BYTES = 1 << 16
# An archive may unpack to this many times its gzipped size, plus UNPACK_ALLOWANCE. Pictures hardly shrink; a gzip bomb
# reaches 1000.
MAX_UNPACKED_RATIO = 100
UNPACK_ALLOWANCE = 1 << 24
# Fewer bytes are skipped by reading: they are in the stream's buffer, and a seek is a system call.
MIN_SEEK_BYTES = 1 << 14
# A name by `describe_content` of a compressed file -> the program that unpacks it to its output.
UNPACKERS = {"Zstandard": "zstd -dc", "bzip2": "bzip2 -dc", "xz": "xz -dc", "LZ4": "lz4 -dc", "gzip": "gzip -dc"}
# A name of another file -> the way to make shards of it.
_PACK = "and `clipscale data pack FOLDER out=SHARDS` if that holds pictures with their texts"
REMEDIES = {
    "a zip archive": f"`unzip {{file}} -d FOLDER`, {_PACK}",
    "a 7z archive": f"`7z x -oFOLDER {{file}}`, {_PACK}",
    "a RAR archive": f"`unrar x {{file}} FOLDER/`, {_PACK}",
    "a Parquet table": "`clipscale data pack {file} out=SHARDS` makes shards of it",
    "a pointer of Git LFS": "`git lfs pull` fetches the file itself",
}


class Stream(Protocol):
    """The bytes of an archive. One that cannot seek is only read."""

    def read(self, size: int, /) -> bytes: ...
    def peek(self, size: int, /) -> bytes: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...


def open_archive(source: io.BufferedReader, name: str = "FILE") -> tuple[Stream, bool]:
    """A stream of the archive, and whether it can seek.

    Raises tarfile.ReadError for an empty source, and for one that is not a tar. The message says what it is, and which
    command makes a tar of a file with this `name`.
    """
    first = source.peek(BLOCK_BYTES)
    if not first:
        raise tarfile.ReadError("empty")
    if first[:2] != b"\x1f\x8b":
        check_is_tar(first, name)
        return source, True
    stream = BoundedGzip(source)
    check_is_tar(stream.peek(BLOCK_BYTES), name, "a gzip of ")
    return stream, False


def check_is_tar(first: bytes, name: str, wrapped: str = "") -> None:
    """Raise tarfile.ReadError for bytes that begin no tar, if it is known what they are. `wrapped`: what held them."""
    with suppress(tarfile.ReadError):
        _check_header(first[:BLOCK_BYTES])
        return
    content = "" if wrapped and len(first) < BLOCK_BYTES else describe_content(first)  # a peek into a gzip may be short
    if not content or not any(first):
        return
    file = shlex.quote(utf8(name))
    new = shlex.quote(f"{name.partition('.tar')[0]}-plain.tar")
    if content in UNPACKERS:
        packed = f"{UNPACKERS['gzip']} {file} | {UNPACKERS[content]}" if wrapped else f"{UNPACKERS[content]} {file}"
        raise tarfile.ReadError(f"{wrapped}{content}, which is not read: `{packed} > {new}` makes a tar of it")
    remedy = ""
    if content in REMEDIES:
        remedy = "; " + REMEDIES[content].format(file=file)
    raise tarfile.ReadError(f"{wrapped}{content}, no tar{remedy}")


class BoundedGzip(gzip.GzipFile):
    """A gzipped archive. Raises tarfile.ReadError if it unpacks to more than MAX_UNPACKED_RATIO allows."""

    def __init__(self, packed: io.BufferedReader) -> None:
        super().__init__(fileobj=packed)
        self.packed = packed

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.tell() > UNPACK_ALLOWANCE + MAX_UNPACKED_RATIO * self.packed.tell():
            raise tarfile.ReadError(f"unpacks to over {MAX_UNPACKED_RATIO} times its size")
        return data


class Header(NamedTuple):
    """A member's header, which precedes its content."""

    name: str
    # Bytes of the content; 0 for a link.
    size: int
    # Bytes up to the content, also of members that were skipped before it.
    bytes_before: int
    # How many of these bytes are headers.
    header_bytes: int
    # For a link: the name of the file that it stands for, by `normalise_name`.
    target: str | None = None


def next_member(stream: Stream) -> Header | None:
    """The header of the next plain file or link. None at the archive's end. Leaves the stream at the content.

    Raises tarfile.TarError for damage, for a member of more than MAX_MEMBER_BYTES, and after MAX_SAMPLE_SPAN bytes, or
    MAX_HEADER_BYTES of headers, without a file.
    """
    extended: dict[str, str] = {}  # fields for the next plain header
    header_budget = MAX_EXTENDED_HEADER_BYTES
    headers = 0
    bytes_before = 0
    while (block := _header(stream)) is not None:
        size = _number(block[124:136])
        type_flag = block[156:157]
        headers += BLOCK_BYTES
        bytes_before += BLOCK_BYTES
        if bytes_before > MAX_SAMPLE_SPAN or headers > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"{bytes_before} bytes without a file")
        if type_flag in b"LxK":
            extended |= _extended(type_flag, read_exactly(stream, size, header_budget))
            read_exactly(stream, -size % BLOCK_BYTES)
            header_budget -= size
            headers += padded_size(size)
            bytes_before += padded_size(size)
            continue
        name = extended.get("path", _name(block))
        if type_flag in b"123456":  # links, devices and folders have no content, whatever their size field says
            if type_flag in b"12":
                link = extended.get("linkpath", _text(block[157:257]))
                return Header(name, 0, bytes_before, headers, link_target(name, link, is_symbolic=type_flag == b"2"))
            size = 0
        else:
            size = int(extended.get("size", size))
            if not 0 <= size <= MAX_MEMBER_BYTES:
                raise tarfile.ReadError(f"member {name!r} claims {size} bytes")
            if type_flag in b"0\x007" and not name.endswith("/"):
                return Header(name, size, bytes_before, headers)
            skip(stream, padded_size(size), False)
        extended = {}
        bytes_before += padded_size(size)
    return None


def link_target(name: str, link: str, *, is_symbolic: bool) -> str:
    """The name, by `normalise_name`, of the member that a link stands for. A symbolic link begins at its own folder."""
    return normalise_name(posixpath.join(posixpath.dirname(name), link) if is_symbolic else link)


def normalise_name(name: str) -> str:
    """A member's name without `.`, `..` and repeated slashes."""
    return posixpath.normpath(name)


def check_end(stream: Stream) -> None:
    """Check what follows the block that ends an archive. Raises tarfile.ReadError for anything but zeros."""
    if any(stream.read(MAX_END_BYTES)):
        raise tarfile.ReadError("more follows where the archive ends, perhaps another one")


def _header(stream: Stream) -> bytes | None:
    """The next header; None at the archive's end."""
    block = stream.read(BLOCK_BYTES)
    if not block or block.count(0) == BLOCK_BYTES:
        return None
    _check_header(block)
    return block


def _check_header(block: bytes) -> None:
    if len(block) < BLOCK_BYTES:
        raise tarfile.ReadError("ends within a header")
    if _number(block[148:156]) != sum(block) - sum(block[148:156]) + 256:
        raise tarfile.ReadError("bad checksum in a header")


def _extended(type_flag: bytes, content: bytes) -> dict[str, str]:
    """The fields of an extended header. A long name (`L`) is `path`, a link's long target (`K`) `linkpath`."""
    if type_flag == b"x":
        return _pax(content)
    return {"path" if type_flag == b"L" else "linkpath": _text(content)}


def _name(block: bytes) -> str:
    name = _text(block[:100])
    if block[257:263] == b"ustar\0" and block[345]:
        name = f"{_text(block[345:500])}/{name}"
    return name


def padded_size(size: int) -> int:
    """The bytes that a member's content takes in an archive."""
    return size + -size % BLOCK_BYTES


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # base 256, for what octal digits cannot hold
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if digits.strip(b"01234567"):
        raise tarfile.ReadError("no tar header")
    return int(digits, 8) if digits else 0


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _pax(content: bytes) -> dict[str, str]:
    """Records of the form `LENGTH KEY=VALUE\\n`."""
    fields = {}
    start = 0
    while start < len(content):
        space = content.find(b" ", start, start + 20)
        length = int(content[start:space]) if space >= 0 else 0
        if length <= 0 or not space < start + length <= len(content):
            raise tarfile.ReadError("bad record in an extended header")
        key, _, value = content[space + 1 : start + length - 1].partition(b"=")
        fields[_text(key)] = value.decode("utf-8", "surrogateescape")
        start += length
    return fields


def read_exactly(stream: Stream, size: int, most: int = MAX_MEMBER_BYTES) -> bytes:
    """Exactly `size` bytes. Raises tarfile.ReadError if there are fewer, or if `size` is over `most`."""
    if not 0 <= size <= most:
        raise tarfile.ReadError(f"a member claims {size} bytes")
    data = stream.read(size)
    if len(data) < size:
        raise tarfile.ReadError("ends within a member")
    return data


def skip(stream: Stream, size: int, can_seek: bool) -> None:
    """Skip `size` bytes. Raises tarfile.ReadError at the end of a stream that cannot seek.

    In a stream that can seek the end goes unnoticed.
    """
    if can_seek and size >= MIN_SEEK_BYTES:
        stream.seek(size, os.SEEK_CUR)
        return
    while size > 0:
        skipped = len(stream.read(min(size, 1 << 20)))
        if not skipped and can_seek:
            return
        if not skipped:
            raise tarfile.ReadError("ends within a member")
        size -= skipped
