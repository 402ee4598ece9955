"""Settings of the training data, and what can be said of them before any shard is looked at."""

from dataclasses import asdict, dataclass, field

from clipscale.config.checks import at_least, choice, shared
from clipscale.config.keys import flat
from clipscale.errors import UserError


@dataclass
class AugmentConfig:
    """Random resized crop, flip and colours of training images (torchvision's conventions)."""

    scale: tuple[float, float] = (0.9, 1.0)
    """Crop area as a share of the image."""
    ratio: tuple[float, float] = (0.75, 1.3333333)
    """Crop aspect ratio, width over height."""
    flip: float = 0.0
    """Probability of a horizontal flip."""
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Strengths of random changes of brightness, contrast, saturation and hue."""
    jitter_probability: float = 0.8
    """Probability that a picture's colours are changed by `jitter` at all."""
    greyscale: float = 0.0
    """Probability of a greyscale picture."""


DECODE = ("exact", "fast", "gpu")
ORDERS = ("auto", "epochs", "resampled")
LEAST = {
    "workers": 0,
    "shuffle": 0,
    "shard_streams": 1,
    "buffers": 1,
    "image_size": 1,
    "max_pixels": 1,
    "max_bytes": 1,
    "cache_bytes": 0,
    "retries": 0,
    "table.rows": 1,
    "filter.min_side": 0,
    "filter.max_aspect": 1,
    "filter.min_caption": 0,
    "filter.max_caption": 1,
}
"""The least that a number may be."""
FEATURES = "npy"
"""The member that `data.image_features=true` stands for."""


@dataclass
class TableConfig:
    """Tables of picture paths and captions (.csv, .tsv, .parquet) in `data.train`."""

    image: str | None = None
    """Column with the picture's path, address or bytes; None: the first of `filepath`, `image`, `path` and the like."""
    caption: str | None = None
    """Column with the caption; None: the first of `title`, `caption`, `text`."""
    rows: int = 10_000
    """Rows that are read as one shard; shards are what epochs shuffle, and what a resumed run begins anew."""


@dataclass
class FilterConfig:
    """Samples to leave out. Each filter counts what it drops under a reason of its own, `filter_...`, among the broken ones."""

    min_side: int = 0
    """Pixels of the shorter side; smaller pictures are dropped (`filter_min_side`)."""
    max_aspect: float | None = None
    """Longer side over shorter; more elongated pictures are dropped (`filter_aspect`)."""
    min_caption: int = 0
    """Characters; shorter captions are dropped (`filter_short_caption`)."""
    max_caption: int | None = None
    """Characters; longer captions are dropped (`filter_long_caption`)."""
    fields: list[str] = field(default_factory=list)
    """Conditions on the json member: `similarity>=0.3`, `punsafe<0.5`, `LANGUAGE=en|de`, `status!=failed` (`filter_FIELD`)."""
    keep_missing: bool = False
    """Keep samples that lack a field of `fields`; otherwise they are dropped (`filter_no_FIELD`)."""
    block_keys: list[str] = field(default_factory=list)
    """Files with a KEY or SHARD/KEY a line, such as `data check` writes of duplicates (`filter_blocked_key`)."""
    block_urls: list[str] = field(default_factory=list)
    """Files with an address a line, looked for in the json member's `url` (`filter_blocked_url`)."""


@dataclass
class DataConfig:
    """Where the training samples come from and how they are read."""

    train: list[str] | None = None
    """Shards: brace lists, globs, `@FILE` listing shards, folders, addresses, tables; several are several sources."""
    weights: list[float] | None = None
    """One weight per source in `train` (drawn in proportion; needs resampling); None: by number of samples."""
    order: str = "auto"
    """`epochs`: each sample exactly once an epoch; `resampled`: shards drawn with replacement; `auto`: epochs where counts are known."""
    workers: int = 2
    """Loader processes per rank; 0 decodes in the training process."""
    shard_streams: int | None = None
    """Independent ordered streams whose union is the global order; None: 64, or what the batch and the ranks need."""
    shuffle: int = 256
    """Samples in each lane's shuffle window; 0: shard order. Every lane holds a window of undecoded samples in memory."""
    buffers: int = 2
    """Local batches held in host memory: 2 lets workers fill the next while one is trained on, 1 halves the memory."""
    image_size: int | None = None
    """Pixels; None: the model's."""
    image_features: str | None = None
    """`true`: the shards hold features of the frozen image tower, by `clipscale data features`, in the place of pictures; or the name of
    the member that does."""
    caption_key: str = "txt"
    """Member that holds the caption: `txt`, or `json:FIELD`."""
    captions: list[str] = field(default_factory=list)
    """Several sources with weights instead, drawn for every sample: `{txt: 0.5, 'json:caption': 0.5}`, or `[txt=0.5,json:caption=0.5]`."""
    templates: list[str] = field(default_factory=list)
    """Texts around the caption, which takes the place of `{}`; one is drawn for every sample."""
    table: TableConfig = field(default_factory=TableConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    decode: str = "exact"
    """`exact`: the pixels of open_clip's transform; `fast`: large JPEGs are decoded at 1/2, 1/4 or 1/8 of their size first; `gpu`: JPEGs
    are decoded and resized on the GPU, once, or with offload=encoded for each pass."""
    max_pixels: int = 89_478_485
    """Larger images are skipped as broken (`huge_image`)."""
    max_bytes: int = 67_108_864
    """Pictures of more bytes, as they lie in the shard, are not read but skipped as broken (`too_large`), as captions beyond 1 MiB are."""
    allow_pipe: bool = False
    """Permit `pipe:` shard addresses, which run a shell command."""
    cache: str | None = None
    """Folder for copies of remote shards, and for indexes that cannot lie beside their shards; None: no copies, the user's cache folder."""
    cache_bytes: int | None = None
    """Bound on the copies in `cache`, the least recently used go first (`500G`); 0: no copies, None: as much as the disk has."""
    retries: int = 8
    """Requests in a row that may fail before a remote shard is given up; each waits longer than the one before."""
    wait_s: float = 30.0
    """A remote server silent for this long is asked again."""
    timeout_s: float = 300.0
    """A worker silent for this long ends the run with its name."""

    @property
    def stored_member(self) -> str | None:
        """The member of each sample that holds features in the place of a picture; None where pictures are read."""
        setting = self.image_features or "false"
        return {"false": None, "true": FEATURES}.get(setting.lower(), setting)

    @property
    def on_device(self) -> bool:
        """Whether the GPU decodes: only where there are pictures."""
        return self.decode == "gpu" and self.stored_member is None


def check(config: DataConfig, batch: int, world: int) -> None:
    """Raise UserError for settings that cannot work with any data."""
    at_least("batch", batch, 1)
    shared(batch, world, f"{world} processes")
    for name, value in flat(asdict(config)):
        if name in LEAST:
            at_least(f"data.{name}", value, LEAST[name])
    if config.timeout_s <= 0:
        raise UserError(f"data.timeout_s={config.timeout_s}: must be positive")
    choice("data.order", config.order, ORDERS)
    choice("data.decode", config.decode, DECODE)
    longest = config.filter.max_caption
    if longest is not None and longest < config.filter.min_caption:
        raise UserError(
            f"data.filter.max_caption={longest} is below data.filter.min_caption={config.filter.min_caption}; no caption passes both"
        )
    augment = config.augment
    if not 0 < augment.scale[0] <= augment.scale[1] <= 1:
        raise UserError(f"data.augment.scale={list(augment.scale)}: must be two shares, 0 < low <= high <= 1")
    if not 0 < augment.ratio[0] <= augment.ratio[1]:
        raise UserError(f"data.augment.ratio={list(augment.ratio)}: must be two aspect ratios, 0 < low <= high")
    for name in ("flip", "jitter_probability", "greyscale"):
        if not 0 <= getattr(augment, name) <= 1:
            raise UserError(f"data.augment.{name}={getattr(augment, name)}: must be a probability")
    if not (min(augment.jitter) >= 0 and augment.jitter[3] <= 0.5):
        raise UserError(
            f"data.augment.jitter={list(augment.jitter)}: must be four strengths from 0 on, the hue's at most 0.5"
        )
