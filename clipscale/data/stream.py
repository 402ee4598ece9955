"""The training stream: which sample comes when, and how it reaches the host batch."""

from dataclasses import dataclass, field


@dataclass
class AugmentConfig:
    """Random resized crop and flip of training images (torchvision's RandomResizedCrop conventions)."""

    scale: tuple[float, float] = (0.9, 1.0)
    """Crop area as a share of the image."""
    ratio: tuple[float, float] = (0.75, 1.3333333)
    """Crop aspect ratio, width over height."""
    flip: float = 0.0
    """Probability of a horizontal flip."""


@dataclass
class DataConfig:
    """Where the training samples come from and how they are read."""

    train: list[str] | None = None
    """Shards: brace lists, globs, `@FILE` listing shards, directories; several are several sources."""
    weights: list[float] | None = None
    """One weight per source in `train` (drawn in proportion when resampled); None: by number of samples."""
    order: str = "auto"
    """`epochs`: each sample exactly once an epoch; `resampled`: shards drawn with replacement; `auto`: epochs where counts are known."""
    workers: int = 2
    """Loader processes per rank; 0 decodes in the training process."""
    lanes: int | None = None
    """Independent ordered streams whose union is the global order; None: 64, or what the batch and the ranks need."""
    shuffle: int = 2000
    """Samples in each lane's shuffle window; 0: shard order."""
    image_size: int | None = None
    """Pixels; None: the model's."""
    caption_key: str = "txt"
    """Member that holds the caption: `txt`, or `json:FIELD`."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    max_pixels: int = 89_478_485
    """Larger images are skipped as broken (`huge`)."""
    allow_pipe: bool = False
    """Permit `pipe:` shard addresses, which run a shell command."""
    timeout_s: float = 300.0
    """A worker silent for this long ends the run with its name."""
