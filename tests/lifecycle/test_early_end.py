"""What the end of a run's loop closes."""

import pytest

from clipscale.lifecycle.early_end import closing_all


class Part:
    """A part of a run, which perhaps cannot be closed."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.is_closed = False

    def close(self) -> None:
        if self.error:
            raise self.error
        self.is_closed = True


def test_all_parts_are_closed_even_if_one_cannot_be() -> None:
    first, last = Part(), Part()
    with pytest.raises(OSError, match="no space"), closing_all(first, Part(OSError("no space")), last):
        pass
    assert first.is_closed and last.is_closed
