"""The chunk sizes of a run, which its steps use and its checkpoints hold."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkSizes:
    """Samples per chunk of each tower."""

    image: int
    text: int
    # The kind of device that they were found on.
    device: str
