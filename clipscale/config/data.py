"""The settings of the training data, and their checks that need no shard."""

from dataclasses import dataclass, field

from clipscale.config.setting import setting

FEATURES = "npy"
"""The member that `data.image_features=true` stands for."""


@dataclass
class AugmentConfig:
    """Random resized crop, flip and colours of training images (torchvision's conventions)."""

    scale: tuple[float, float] = setting((0.9, 1.0), "Crop area as a share of the image.", above=0, most=1)
    ratio: tuple[float, float] = setting((0.75, 1.3333333), "Crop aspect ratio, width over height.", above=0)
    flip: float = setting(0.0, "Probability of a horizontal flip.", least=0, most=1)
    jitter: tuple[float, float, float, float] = setting(
        (0.0, 0.0, 0.0, 0.0),
        "Strengths of changes of brightness, contrast, saturation, hue (this at most 0.5), made to 80 % of the images.",
        least=0,
    )
    greyscale: float = setting(0.0, "Probability of a greyscale image.", least=0, most=1)


@dataclass
class FilterConfig:
    """Samples to leave out. Each filter counts the samples it drops as broken, under its own reason `filter_...`."""

    min_side: int = setting(0, "Least pixels of the shorter side (`filter_min_side`).", least=0)
    max_aspect: float | None = setting(None, "Largest ratio of longer to shorter side (`filter_aspect`).", least=1)
    min_caption: int = setting(0, "Least characters (`filter_short_caption`).", least=0)
    max_caption: int | None = setting(None, "Most characters (`filter_long_caption`).", least=1)
    fields: list[str] = setting(
        [], "Conditions on the json member: `similarity>=0.3`, `LANGUAGE=en|de`, `status!=failed` (`filter_FIELD`)."
    )


@dataclass
class DataConfig:
    """Where the training samples come from, and how they are read."""

    train: list[str] | None = setting(
        None, "Shards: brace lists, globs, `@FILE` listing shards, folders, URLs; several are several sources."
    )
    weights: list[float] | None = setting(
        None, "Each source's share of every batch, drawn with replacement; null: by samples."
    )
    order: str = setting(
        "auto",
        "`epochs`: each sample once; `resampled`: shards drawn with replacement; `auto`: epochs, if counts are known.",
        choices=("auto", "epochs", "resampled"),
    )
    workers: int | None = setting(
        None, "Loader processes per rank; null: its cores less one, 1 to 16; 0: the training process decodes.", least=0
    )
    shard_streams: int | None = setting(
        None, "Logical readers, which together make the global order; null: 64, or what batch and ranks need.", least=1
    )
    shuffle: int = setting(256, "Samples in each shard stream's shuffle window, undecoded; 0: shard order.", least=0)
    buffers: int = setting(2, "Local batches in host memory; with 1, none is read during a step.", least=1)
    image_features: str | None = setting(
        None, "Features of `clipscale embed format=webdataset` instead of images: `true`, or the name of their member."
    )
    captions: list[str] = setting(
        ["txt"],
        "Where the caption is: `txt`, or `json:FIELD`; with weights, one is drawn per sample: `[txt=1,json:alt=3]`.",
    )
    captions_per_step: int = setting(
        1, "Captions of each sample in a step, drawn without replacement; its picture is encoded once.", least=1
    )
    same: str | None = setting(
        None, "What samples share, for `loss.shared`: `caption`, or a field of the json (`url`, `sha256`, ...)."
    )
    text: str = setting(
        "truncate",
        "Of a caption too long for the context: its first tokens (`truncate`), a random `block`, or `random` ones.",
        choices=("truncate", "block", "random"),
    )
    sort_captions: bool = setting(
        True, "Chunks hold captions of like length, little padded, where the tower allows it; false: the batch's order."
    )
    only_keys: str | None = setting(
        None,
        "A subset of the samples: DataComp's uids (`FILE.npy`, dtype `u8,u8`, sorted), or a text of keys, one a line.",
    )
    filter: FilterConfig = field(default_factory=FilterConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    decode: str = setting(
        "exact",
        "`exact`: the pixels of open_clip's transform; `fast`: large JPEGs are decoded at 1/2, 1/4 or 1/8.",
        choices=("exact", "fast"),
    )
    max_pixels: int = setting(89_478_485, "Most pixels of an image; others are broken (`huge_image`).", least=1)
    max_bytes: int = setting(67_108_864, "Most encoded bytes of an image; a caption has 1 MiB (`too_large`).", least=1)
    allow_pipe: bool = setting(False, "Allow `pipe:` shards, which run a shell command.")
    timeout_s: float = setting(300.0, "Seconds without progress after which a worker ends the run.", above=0)

    @property
    def stored_member(self) -> str | None:
        """The member of each sample that holds features instead of an image; None if images are read."""
        value = self.image_features or "false"
        return {"false": None, "true": FEATURES}.get(value.lower(), value)
