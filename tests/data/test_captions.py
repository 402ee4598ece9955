"""A sample's captions, whatever their encoding, and a reason for each that cannot be used."""

from pathlib import Path

import pytest

from clipscale.common import files
from clipscale.data.captions import captions_in
from clipscale.data.sample import BrokenSampleError

SAMPLES = files.read_yaml(Path(__file__).with_name("samples.yaml"))


@pytest.mark.parametrize(("column", "text", "reason"), [*SAMPLES["captions"], ("json:alt", "[" * 100_000, "bad_json")])
def test_unusable_captions_have_a_reason(column: str, text: str | None, reason: str) -> None:
    members = {} if text is None else {column.partition(":")[0]: text.encode("latin-1")}
    with pytest.raises(BrokenSampleError, match=reason):
        captions_in(members, column)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_captions_are_decoded_by_their_byte_order_mark(encoding: str) -> None:
    assert captions_in({"txt": "a red café\n".encode(encoding)}, "txt") == ["a red café"]
