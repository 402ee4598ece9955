"""Ranges of rows."""

# First row, and the row after the last.
Span = tuple[int, int]


def equal_spans(rows: int, size: int) -> list[Span]:
    """The spans of `size` rows each. The last one may be shorter."""
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]
