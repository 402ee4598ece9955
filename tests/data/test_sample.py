"""The rule by which members' names form samples."""

import time

import pytest

from clipscale.data.sample import key_and_extension
from tests.data.test_captions import SAMPLES


@pytest.mark.parametrize(("name", "parts"), [*SAMPLES["names"], ("x" * 4100 + ".jpg", None)])
def test_the_key_ends_at_the_first_dot_after_the_last_slash(name: str, parts: list[str] | None) -> None:
    assert key_and_extension(name) == (parts and tuple(parts))


def test_a_name_of_a_megabyte_takes_no_time() -> None:
    """64 kB without a dot took 22 s in a regular expression."""
    begun = time.process_time()
    for name in ("x" * 2**20, "x/" * 2**19, "__" * 2**19):
        assert key_and_extension(name) is None
    assert time.process_time() - begun < 2
