"""The chunks of a batch: their sizes, and their ranges of rows."""

from dataclasses import dataclass

# First row, and the row after the last.
Span = tuple[int, int]


@dataclass(frozen=True)
class ChunkSizes:
    """Samples per chunk of each tower."""

    image: int
    text: int
    # The kind of device that they were found on.
    device: str


def equal_spans(rows: int, size: int) -> list[Span]:
    """The spans of `size` rows each. The last one may be shorter."""
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]
