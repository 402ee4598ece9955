"""The settings of the training data, and their checks that need no shard."""

from dataclasses import dataclass, field

from clipscale.config.checks import at_least, check_values, shared
from clipscale.config.setting import setting
from clipscale.errors import UserError

DECODE = ("exact", "fast", "gpu")
FEATURES = "npy"
"""The member that `data.image_features=true` stands for."""


@dataclass
class AugmentConfig:
    """Random resized crop, flip and colours of training images (torchvision's conventions)."""

    scale: tuple[float, float] = setting((0.9, 1.0), "Crop area as a share of the image.")
    ratio: tuple[float, float] = setting((0.75, 1.3333333), "Crop aspect ratio, width over height.")
    flip: float = setting(0.0, "Probability of a horizontal flip.")
    jitter: tuple[float, float, float, float] = setting(
        (0.0, 0.0, 0.0, 0.0),
        "Strengths of random changes of brightness, contrast, saturation and hue (the hue's at most 0.5).",
    )
    jitter_probability: float = setting(0.8, "Probability that `jitter` changes an image's colours at all.")
    greyscale: float = setting(0.0, "Probability of a greyscale image.")


@dataclass
class TableConfig:
    """Tables of image paths and captions (.csv, .tsv, .parquet) in `data.train`."""

    image: str | None = setting(
        None,
        "Column with the image's path, address or bytes; null: the first of `filepath`, `image`, `path` and similar.",
    )
    caption: str | None = setting(None, "Column with the caption; null: the first of `title`, `caption`, `text`.")
    root: str | None = setting(
        None,
        "Folder that may hold the files a table names, or for a remote table the beginning of their addresses; null: the "
        "table's own folder or server. Others count as `refused_file`. `/` allows every local file.",
        literal=True,
    )
    rows: int = setting(
        10_000,
        "Rows read as one shard. Epochs shuffle shards, and a resumed run reads its unfinished shards again.",
        least=1,
    )


@dataclass
class FilterConfig:
    """Samples to leave out. Each filter counts the samples it drops as broken, under its own reason `filter_...`."""

    min_side: int = setting(0, "Least pixels of the shorter side; others are dropped (`filter_min_side`).", least=0)
    max_aspect: float | None = setting(
        None, "Largest ratio of the longer to the shorter side; other images are dropped (`filter_aspect`).", least=1
    )
    min_caption: int = setting(0, "Least characters; others are dropped (`filter_short_caption`).", least=0)
    max_caption: int | None = setting(None, "Most characters; others are dropped (`filter_long_caption`).", least=1)
    fields: list[str] = setting(
        [],
        "Conditions on the json member: `similarity>=0.3`, `punsafe<0.5`, `LANGUAGE=en|de`, `status!=failed` "
        "(`filter_FIELD`).",
        literal=True,
    )
    keep_missing: bool = setting(False, "Keep samples that lack a field of `fields` (`filter_no_FIELD`).")
    block_keys: list[str] = setting(
        [],
        "Files with one KEY or SHARD/KEY per line, such as duplicates.txt of `data check` (`filter_blocked_key`).",
        literal=True,
    )
    block_urls: list[str] = setting(
        [], "Files with one URL per line, compared with the json member's `url` (`filter_blocked_url`).", literal=True
    )


@dataclass
class DataConfig:
    """Where the training samples come from, and how they are read."""

    train: list[str] | None = setting(
        None,
        "Shards: brace lists, globs, `@FILE` listing shards, folders, URLs, tables; several entries are several sources.",
        literal=True,
    )
    pipeline: str | None = setting(
        None,
        "`MODULE:FUNCTION` instead of `train`: called with stream, streams and epoch, it gives samples as webdataset's "
        "pipelines do.",
    )
    weights: list[float] | None = setting(
        None,
        "A weight per source in `train`: its share of the samples of every batch, drawn with replacement; null: by samples.",
    )
    order: str = setting(
        "auto",
        "`epochs`: each sample exactly once an epoch; `resampled`: shards drawn with replacement; `auto`: `epochs` if "
        "the sample counts are known.",
        choices=("auto", "epochs", "resampled"),
    )
    workers: int | None = setting(
        None,
        "Loader processes per rank; null: a rank's cores less one, 1 to 16; 0: decode in the training process.",
        least=0,
    )
    shard_streams: int | None = setting(
        None,
        "Logical readers, each with its own order; together they make the global order. null: 64, or what batch and "
        "ranks need.",
        least=1,
    )
    shuffle: int = setting(256, "Samples in each shard stream's shuffle window, undecoded; 0: shard order.", least=0)
    buffers: int = setting(2, "Local batches in host memory; with 1, none is read during a step.", least=1)
    image_size: int | None = setting(None, "Side of the images in pixels; null: the model's.", least=1)
    image_features: str | None = setting(
        None,
        "`true`: the shards hold features of the frozen image tower (`clipscale data features`) instead of images; or "
        "the name of the member with the features.",
    )
    caption_key: str = setting("txt", "Member that holds the caption: `txt`, or `json:FIELD`.")
    captions: list[str] = setting(
        [],
        "Several caption members with weights, one drawn per sample: `{txt: 0.5, 'json:caption': 0.5}` or "
        "`[txt=0.5,json:caption=0.5]`. Replaces `caption_key`.",
        literal=True,
    )
    sort_captions: bool = setting(
        True,
        "Text chunks hold captions of like length and no more padding than these need, where the text tower's features "
        "do not depend on padding. false: the order of the batch, padded to the whole context.",
    )
    templates: list[str] = setting([], "Texts with `{}` for the caption; one is drawn per sample.", literal=True)
    table: TableConfig = field(default_factory=TableConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    decode: str = setting(
        "exact",
        "`exact`: the pixels of open_clip's transform; `fast`: large JPEGs are decoded at 1/2, 1/4 or 1/8 of their size; "
        "`gpu`: JPEGs are decoded and resized on the GPU (with offload=encoded, once per pass).",
        choices=DECODE,
    )
    max_pixels: int = setting(
        89_478_485, "Most pixels of an image; others are skipped as broken (`huge_image`).", least=1
    )
    max_bytes: int = setting(
        67_108_864,
        "Most encoded bytes of an image; larger ones, and captions beyond 1 MiB, are skipped as broken (`too_large`).",
        least=1,
    )
    max_word: int = setting(
        1024,
        "Most bytes of a word in a caption; the time to tokenise a word grows with its square. Samples with longer ones are "
        "skipped as broken (`long_word`).",
        least=1,
    )
    allow_pipe: bool = setting(False, "Allow `pipe:` shards, which run a shell command.")
    cache: str | None = setting(
        None,
        "Folder for copies of remote shards, and for indexes that cannot be written beside their shards; null: no "
        "copies, and indexes in the user's cache folder.",
    )
    cache_bytes: int | None = setting(
        None,
        "Most bytes of copies in `cache` (`500G`); the least recently used are deleted first. 0: no copies, null: no bound.",
        least=0,
    )
    retries: int = setting(8, "Retries of a failed remote request, each after a longer wait.", least=0)
    wait_s: float = setting(30.0, "Seconds without an answer after which a remote request is retried.")
    timeout_s: float = setting(300.0, "Seconds without progress after which a worker ends the run with an error.")

    @property
    def stored_member(self) -> str | None:
        """The member of each sample that holds features instead of an image; None if images are read."""
        value = self.image_features or "false"
        return {"false": None, "true": FEATURES}.get(value.lower(), value)

    @property
    def on_device(self) -> bool:
        """Whether the GPU decodes; features need no decoding."""
        return self.decode == "gpu" and self.stored_member is None


def check(config: DataConfig, batch: int, world: int) -> None:
    """Raise UserError for settings that no data fits."""
    at_least("batch", batch, 1)
    shared(batch, world, f"{world} processes")
    check_values(config, "data.")
    if config.timeout_s <= 0:
        raise UserError(f"data.timeout_s={config.timeout_s}: must be positive")
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
