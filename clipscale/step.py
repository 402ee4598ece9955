"""The gradient cache: one exact optimizer step at any batch size."""

from dataclasses import dataclass


@dataclass
class CacheConfig:
    """How the local batch is cut into chunks."""

    chunk: int | None = None
    """Samples per chunk for both towers; None: 256, or the local batch where that is smaller."""
    image_chunk: int | None = None
    """Samples per image chunk; None: `chunk`."""
    text_chunk: int | None = None
    """Samples per text chunk; None: `chunk`."""
