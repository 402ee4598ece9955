"""The tar format: what the standard library wrote is read."""

import io
import tarfile

from hypothesis import example, given, settings
from hypothesis import strategies as st

from clipscale.data.tar import BLOCK, next_member

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300).filter(
    lambda n: not n.endswith("/")
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(names, st.binary(max_size=1500)), max_size=6),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
@example([("d" * 90 + "/" + "f" * 60, b"x" * 512)], tarfile.USTAR_FORMAT)
def test_members_are_what_tarfile_wrote(members: list[tuple[str, bytes]], form: int) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for number, (name, data) in enumerate(members):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
            folder, link = tarfile.TarInfo(f"folder{number}"), tarfile.TarInfo(f"link{number}.txt")
            folder.type, link.type, link.linkname = tarfile.DIRTYPE, tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(folder)
            tar.addfile(link)
    out.seek(0)
    found = []
    while (header := next_member(out)) is not None:
        name, size = header
        found.append((name, out.read(size)))
        out.read(-size % BLOCK)
    assert found == members
