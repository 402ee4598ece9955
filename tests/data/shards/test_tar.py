"""The tar format: archives of the standard library are read, invalid headers are refused."""

import io
import tarfile
from contextlib import suppress

from hypothesis import example, given, settings
from hypothesis import strategies as st

from clipscale.data.shards.tar import next_member, padded

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300).filter(
    lambda n: not n.endswith("/")
)


@settings(max_examples=50)
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
                info.type, info.linkname = kind, "/etc/passwd"
                info.size = len(data) if kind == tarfile.REGTYPE else 0
                tar.addfile(info, io.BytesIO(data))
    out.seek(0)
    read, at = [], 0
    while (header := next_member(out)) is not None:
        name, size, taken = header
        assert out.tell() == at + taken
        read.append((name, out.read(padded(size))[:size]))
        at += taken + padded(size)
    assert read == members


def extended(content: bytes) -> io.BytesIO:
    """A pax header with this content, and an empty file `a`."""
    header, file = tarfile.TarInfo("x"), tarfile.TarInfo("a")
    header.type, header.size = tarfile.XHDTYPE, len(content)
    return io.BytesIO(header.tobuf() + content + bytes(-len(content) % 512) + file.tobuf())


@settings(max_examples=100)
@given(st.lists(st.sampled_from([b"10 path=b\n", b"9 size=4\n", b"6 a=b\n"]) | st.binary(max_size=30), max_size=4))
def test_an_extended_header_is_read_to_its_end_whatever_it_holds(parts: list[bytes]) -> None:
    with suppress(tarfile.TarError, ValueError):
        assert next_member(extended(b"".join(parts))) is not None
