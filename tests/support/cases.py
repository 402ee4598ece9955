"""Cases of parametrized tests."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(ordinary: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases: these for the ordinary suite, and the others, which are like one of them, marked slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in ordinary else pytest.mark.slow,
        )
        for case in cases
    ]
