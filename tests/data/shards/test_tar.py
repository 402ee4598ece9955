"""The tar format: archives of the standard library are read, invalid headers are refused."""

import bz2
import gzip
import io
import lzma
import os
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clipscale.cli.main import main
from clipscale.common.errors import UserError
from clipscale.data.shards import reader, tar
from clipscale.data.shards.index import scan_shard
from clipscale.data.shards.tar import next_member, normalise_name, padded_size
from tests.conftest import Capture
from tests.data.streams import open_stream

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300).filter(
    lambda n: not n.endswith("/")
)


@settings(max_examples=5)
@given(
    st.lists(st.tuples(names, st.binary(max_size=1500)), max_size=6),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
@example([("d" * 90 + "/" + "f" * 60, b"x" * 512)], tarfile.USTAR_FORMAT)
def test_members_are_what_tarfile_wrote(members: list[tuple[str, bytes]], form: int) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in members:
            for kind in (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE):
                info = tarfile.TarInfo(name)
                info.type = kind
                info.linkname = f"/etc/{name[:20]}"
                info.size = len(data) if kind == tarfile.REGTYPE else 0
                tar.addfile(info, io.BytesIO(data))
    out.seek(0)
    read = []
    at = 0
    while (header := next_member(out)) is not None:
        assert out.tell() == at + header.bytes_before
        content = out.read(padded_size(header.size))[: header.size]
        read.append((header.name, content if header.target is None else header.target))
        at += header.bytes_before + padded_size(header.size)
    written = []
    for name, data in members:
        written += [(name, data), (name, normalise_name(f"/etc/{name[:20]}"))]
    assert read == written


def member(kind: bytes, content: bytes = b"", name: str = "a.txt") -> bytes:
    header = tarfile.TarInfo(name)
    header.type = kind
    header.size = len(content)
    return header.tobuf() + content + bytes(-len(content) % 512)


def extended(content: bytes, kind: bytes = tarfile.REGTYPE) -> io.BytesIO:
    """A pax header with this content, and an empty member."""
    return io.BytesIO(member(tarfile.XHDTYPE, content) + member(kind))


@settings(max_examples=100)
@given(st.lists(st.sampled_from([b"10 path=b\n", b"9 size=4\n", b"6 a=b\n"]) | st.binary(max_size=30), max_size=4))
def test_an_extended_header_is_read_to_its_end_whatever_it_holds(parts: list[bytes]) -> None:
    with suppress(tarfile.TarError, ValueError):
        assert next_member(extended(b"".join(parts))) is not None


SIZES = [b"13 size=-512\n", b"28 size=1152921504606846976\n"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [b"0", b"g", b"V"])
def test_a_size_that_no_member_has_is_damage(kind: bytes, size: bytes) -> None:
    with pytest.raises(tarfile.ReadError, match="claims"):
        next_member(extended(size, kind))


class Endless:
    """A file of a sample's first member, after which the other members come again and again. `given`: bytes read."""

    def __init__(self, members: bytes) -> None:
        self.members = members
        self.given = -len(FIRST)

    def read(self, size: int) -> bytes:
        if self.given < 0:
            self.given += size
            return FIRST
        at = self.given % len(self.members)
        self.given += size
        return (self.members * (1 + (at + size) // len(self.members)))[at : at + size]


FIRST = member(b"0", name="a.jpg")
PAX = b"".join(b"17 %09d=abc\n" % key for key in range(60_000))
ENDLESS = {
    "folders": member(b"5"),
    "empty headers": member(b"x"),
    "headers": member(b"x", PAX),
    "headers of folders": member(b"x", PAX) + member(b"5"),
    "empty members of one sample": member(b"0"),
    "members of no sample": member(b"0", bytes(9000), "readme"),
    "one sample": member(b"0", bytes(9000)),
}


@pytest.mark.parametrize("members", ENDLESS.values(), ids=ENDLESS)
def test_members_without_end_are_damage(members: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1 << (23 if bytes(9000) in members else 21)
    for module in tar, reader:
        monkeypatch.setattr(module, "MAX_SAMPLE_SPAN", 1 << 22)
        monkeypatch.setattr(module, "MAX_HEADER_BYTES", 1 << 20)
    stream = Endless(members)
    with pytest.raises(tarfile.ReadError):
        for _, taken in reader.Archive(stream, False).samples():
            assert all(stream.given < most for _ in taken)
    assert stream.given <= most


@pytest.mark.parametrize(
    ("more", "reason"),
    [(bytes(9728), None), (bytes(9728) + member(b"0"), "truncated_shard"), (b"x", "truncated_shard")],
)
def test_what_follows_the_end_of_an_archive_has_a_reason(tmp_path: Path, more: bytes, reason: str | None) -> None:
    path = tmp_path / "0.tar"
    for data in (plain := member(b"0") + bytes(1024) + more, gzip.compress(plain)):
        path.write_bytes(data)
        entry = scan_shard(str(path))
        assert (entry.samples, entry.reason) == (1, reason), entry.detail


TAR = member(b"0") + bytes(1024)
OTHERS = {  # files that are not tars: their names and bytes, and words of the line about them
    "bzip2": ("0.tar.bz2", bz2.compress(TAR), ["bzip2", "`bzip2 -dc 0.tar.bz2 > 0-plain.tar`"]),
    "xz": ("a b.tar", lzma.compress(TAR), ["xz", "`xz -dc 'a b.tar' > 'a b-plain.tar'`"]),
    "Zstandard": ("0.tar", b"\x28\xb5\x2f\xfd" + bytes(99), ["Zstandard", "`zstd -dc 0.tar > 0-plain.tar`"]),
    "packed twice": (
        "0.tgz",
        gzip.compress(gzip.compress(os.urandom(999))),
        ["a gzip of gzip", "gzip -dc 0.tgz | gzip"],
    ),
    "zip": ("0.tar", b"PK\3\4" + bytes(99), ["a zip archive, no tar", "unzip 0.tar", "clipscale data pack"]),
    "web page": ("0.tar", b"<!DOCTYPE html><html>404", ["a web page (HTML), no tar"]),
    "pointer": ("0.tar", b"version https://git-lfs.github.com/spec/v1\n", ["Git LFS", "git lfs pull"]),
    "table": ("0.tar", b"PAR1" + bytes(999), ["a Parquet table", "clipscale data pack 0.tar out=SHARDS"]),
    "gzip of text": ("0.tar.gz", gzip.compress(b"words, " * 999), ["a gzip of text, no tar"]),
}


@pytest.mark.parametrize(("name", "data", "said"), OTHERS.values(), ids=OTHERS)
def test_the_line_about_a_file_that_is_no_tar_says_what_it_is(
    tmp_path: Path, capsys: Capture, name: str, data: bytes, said: list[str]
) -> None:
    """The check, the index and a run that refuses it go by its first bytes, not by its name."""
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UserError) as error:
        open_stream(path, batch=1)
    entry = scan_shard(str(path))
    main(["data", "check", str(path)])
    table = capsys.readouterr().out
    assert entry.reason == "unreadable_shard"
    assert [words for words in said if words not in entry.detail or words not in str(error.value)] == []
    assert said[0].split()[0] in table and "KEY.jpg" not in table + str(error.value)


@pytest.mark.parametrize("name", ["BM.txt", "[a].txt", "{a.txt", "BZh.txt", "%PDF.txt"])
def test_a_tar_is_one_whatever_its_first_name_is(tmp_path: Path, name: str) -> None:
    old = bytearray(member(b"0", name=name) + bytes(1024))
    old[257:265] = bytes(8)  # as before POSIX
    old[148:156] = b"%06o\0 " % (sum(old[:148]) + 256 + sum(old[156:512]))
    for number, data in enumerate((bytes(old), gzip.compress(bytes(old)))):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(data)
        entry = scan_shard(str(path))
        assert (entry.samples, entry.reason) == (1, None), entry.detail


def test_a_name_of_a_megabyte_makes_no_long_line(tmp_path: Path) -> None:
    name = b"n" * 900_000
    path = tmp_path / "0.tar"
    path.write_bytes(extended(b"900013 path=%s\n" % name + SIZES[0]).getvalue())
    assert len(scan_shard(str(path)).detail) < 1000
