"""Cases of parametrized tests."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_except(ordinary: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """All `cases`, marked slow except for the `ordinary` ones. Each slow case is like one of these."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in ordinary else pytest.mark.slow,
        )
        for case in cases
    ]
