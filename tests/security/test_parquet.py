"""Parquet files that claim, repeat or unpack to much more than they hold: one clear line, and little memory."""

import io
import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipscale.common.errors import UserError
from clipscale.config.data import TableConfig
from clipscale.data.shards import parquet as reader
from clipscale.data.shards.access import SourceError
from clipscale.data.shards.listing import expand
from clipscale.data.shards.parquet_headers import Compact, check_pages
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store
from tests.security.limits import bounded


def test_a_text_that_a_parquet_dictionary_repeats_is_held_once(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    count, text = 5000, os.urandom(1 << 19).hex()  # a mebibyte, five thousand times
    names = pyarrow.array(["1.png"] * count)
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count), pyarrow.array([text]))
    parquet.write_table(pyarrow.table({"filepath": names, "title": texts}), tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").stat().st_size < 3 << 20
    with bounded(seconds=20, grown=512 << 20):
        raws = [
            raw
            for url in expand(f"{tmp_path}/t.parquet")
            for raw in read_shard(url, ReadProblem(), want=lambda _: False)
        ]
    assert len(raws) == count and raws[-1].extent > len(text)


def test_a_parquet_column_unpacks_in_proportion(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"filepath": ["1.png"] * 100, "title": ["a" * (1 << 20)] * 100})
    parquet.write_table(table, tmp_path / "t.parquet", compression="zstd", use_dictionary=False)
    assert (tmp_path / "t.parquet").stat().st_size < 1 << 20
    problem = ReadProblem()
    with bounded(grown=256 << 20):
        assert not [raw for url in expand(f"{tmp_path}/t.parquet") for raw in read_shard(url, problem)]
    assert "out of proportion" in problem.detail


def test_a_parquet_footer_that_claims_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"filepath": ["1.png"] * 100, "title": ["a"] * 100}), tmp_path / "t.parquet")
    monkeypatch.setattr(reader, "MOST_PARTS", 50)
    with pytest.raises(UserError, match="claims more than 50"):
        expand(f"{tmp_path}/t.parquet", table=TableConfig(rows=1))


def varint(value: int, size: int = 0) -> bytes:
    """Thrift's compact form of a signed number; in `size` bytes, as no writer has it and every reader takes it."""
    value, found = 2 * value if value >= 0 else -2 * value - 1, bytearray()
    while value > 127 or len(found) + 1 < size:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes(found) + bytes([value])


@pytest.mark.parametrize("remote", [False, True])
def test_a_page_that_is_larger_than_the_footer_says_is_refused(
    tmp_path: Path, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    table = pyarrow.table({"filepath": ["1.png"], "title": ["a" * 70_000_000]})
    parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    size = varint(parquet.ParquetFile(path).metadata.row_group(0).column(1).total_uncompressed_size)
    data = path.read_bytes()
    path.write_bytes(data.replace(size, varint(1000, len(size))))
    assert parquet.ParquetFile(path).metadata.row_group(0).column(1).total_uncompressed_size == 1000
    if remote:  # the bytes come through the program's own file
        monkeypatch.setattr(reader, "is_local", lambda path: False)
    with bounded(grown=64 << 20), pytest.raises(SourceError, match="a page claims more than it can hold"):
        list(reader.rows(Store(), str(path), "0.0", 1, "filepath"))


def page(unpacked: int, packed: int, kind: int, values: int) -> bytes:
    """A page's header in Thrift's compact protocol: type, sizes, and the structure of its kind with the count of values."""
    start = b"\x15\x00\x15" + varint(unpacked) + b"\x15" + varint(packed)
    return start + bytes([(kind - 3) << 4 | 12]) + b"\x15" + varint(values) + b"\x15\x00\x00\x00"


@settings(max_examples=200)
@given(
    pages=st.lists(
        st.tuples(st.integers(-10, 2**31), st.integers(-10, 100), st.sampled_from([5, 7, 8]), st.integers(-10, 2**31)),
        min_size=1,
        max_size=4,
    )
)
def test_pages_claim_no_more_than_the_bound(pages: list[tuple[int, int, int, int]]) -> None:
    data = b"".join(page(*one) + bytes(max(0, one[1])) for one in pages)
    most = 1 << 20
    right = all(one[0] >= 0 and one[1] >= 0 and 0 <= one[3] <= (one[0] if one[2] == 7 else most) for one in pages)
    if right and sum(one[0] for one in pages) <= most:
        check_pages(io.BytesIO(data), 0, len(data), most)
        return
    with pytest.raises(ValueError, match="a page"):
        check_pages(io.BytesIO(data), 0, len(data), most)


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_headers_of_any_bytes_are_an_error_or_a_structure(data: bytes) -> None:
    with suppress(ValueError):
        Compact(data).struct()
    with suppress(ValueError):
        check_pages(io.BytesIO(data), 0, len(data), 1 << 20)


def test_columns_are_nested_to_a_bound(tmp_path: Path) -> None:
    """pyarrow reads nested groups by recursion in C++."""
    schema = b"\x15\x02\x19\xfc"
    groups = 20_000
    count, plain = bytearray(), groups + 1
    while plain > 127:
        count.append(plain & 127 | 128)
        plain >>= 7
    element = b"\x35\x02\x18\x01a\x15\x02\x00"  # required, a name, one child
    footer = schema + bytes(count) + bytes([plain]) + element * groups + b"\x15\x02\x25\x02\x18\x01a\x00"
    footer += b"\x16\x00\x19\x0c\x00"
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    with bounded(), pytest.raises(UserError, match="nested too deeply"):
        expand(str(path))
