"""Any bytes as a table are pairs, or one line that says what is wrong with it."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.tools.data.pack.pairs import pairs_of, tables_of

PIECES = st.sampled_from(
    [b"image,caption\n", b"image\tcaption\n", b'{"image": "a.jpg", "caption": "b"}\n', b"[", b"]", b",", b'"', b"\n"]
    + [b"\r", b"\xff\xfe", b"\xef\xbb\xbf", b"\0", b"a.jpg,b\n", b"\xe9", "é".encode(), b'{"images": []', b"{", b"}"]
)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json"])
@settings(max_examples=30, deadline=None)
@given(pieces=st.lists(PIECES | st.binary(max_size=4), max_size=12))
@example(pieces=[b"a" * 5_000_000])
@example(pieces=[b"image,caption\n", b"a" * 5_000_000])
@example(pieces=[b"[" * 100_000])
@example(pieces=[b'[{"images": ["a"], "image": "a.jpg", "caption": "a"}]'])
def test_any_bytes_are_a_table_or_one_line(suffix: str, pieces: list[bytes]) -> None:
    with TemporaryDirectory() as folder:
        table = Path(folder) / f"table{suffix}"
        table.write_bytes(b"".join(pieces))
        try:
            with files.damage_to_user_error("table", table, "repair it"):
                tables = tables_of(table, None)
            if tables:
                assert all(pair.broken or pair.place.name for pair in pairs_of(table, tables, ""))
        except UserError as error:
            assert "\n" not in str(error)
