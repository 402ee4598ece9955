"""Tests of evaluation sets load each set anew."""

import pytest

from clipscale.eval.sets.load import load_set


@pytest.fixture(autouse=True)
def nothing_cached() -> None:
    load_set.cache_clear()
