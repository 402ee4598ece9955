"""Four ranks for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.support.ranks import Workers, workers


@pytest.fixture(scope="session")
def ranks() -> Iterator[Workers]:
    with workers(4) as started:
        yield started
