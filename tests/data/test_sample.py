"""The rule by which members' names form samples; a sample's captions, and a reason for each that cannot be used."""

import time
from pathlib import Path

import pytest

from clipscale.common import files
from clipscale.data.sample import BrokenSampleError, captions_in, key_and_extension

SAMPLES = files.read_yaml(Path(__file__).with_name("samples.yaml"))


@pytest.mark.parametrize(("name", "parts"), [*SAMPLES["names"], ("x" * 4100 + ".jpg", None)])
def test_the_key_ends_at_the_first_dot_after_the_last_slash(name: str, parts: list[str] | None) -> None:
    assert key_and_extension(name) == (parts and tuple(parts))


def test_a_name_of_a_megabyte_takes_no_time() -> None:
    """64 kB without a dot took 22 s in a regular expression."""
    begun = time.process_time()
    for name in ("x" * 2**20, "x/" * 2**19, "__" * 2**19):
        assert key_and_extension(name) is None
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(("column", "text", "reason"), [*SAMPLES["captions"], ("json:alt", "[" * 100_000, "bad_json")])
def test_unusable_captions_have_a_reason(column: str, text: str | None, reason: str) -> None:
    members = {} if text is None else {column.partition(":")[0]: text.encode("latin-1")}
    with pytest.raises(BrokenSampleError, match=reason):
        captions_in(members, column)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_captions_are_decoded_by_their_byte_order_mark(encoding: str) -> None:
    assert captions_in({"txt": "a red café\n".encode(encoding)}, "txt") == ["a red café"]
