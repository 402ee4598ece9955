"""Chunks of a tower's input: their sizes, which a checkpoint holds, and their ranges."""

from dataclasses import dataclass

# Most samples or captions in a chunk: with more, attention kernels exceed the largest grid.
MAX_CHUNK = 2**15
# A chunk: its range start..stop.
Span = tuple[int, int]


@dataclass(frozen=True)
class ChunkSizes:
    """Samples per chunk of each tower."""

    image: int
    text: int
    # The kind of device that they were found on.
    device: str


def equal_spans(rows: int, size: int) -> list[Span]:
    """Chunks of `size` rows. The last one may be shorter."""
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]
