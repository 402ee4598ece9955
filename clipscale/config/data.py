"""The settings of the training data, and their checks that need no shard."""

import re
from dataclasses import dataclass

from clipscale.common.batch import TextLayout
from clipscale.common.errors import UserError
from clipscale.config.conditions import parse_caption_sources, parse_conditions
from clipscale.config.setting import section, setting


@dataclass(frozen=True)
class AugmentConfig:
    """Random resized crop and flip of training images (torchvision's conventions)."""

    scale: tuple[float, float] = setting((0.9, 1.0), "Crop area as a share of the image.", above=0, most=1)
    ratio: tuple[float, float] = setting((0.75, 1.3333333), "Crop aspect ratio, width over height.", above=0)
    flip: float = setting(0.0, "Probability of a horizontal flip.", least=0, most=1)

    def check(self) -> None:
        """Raise UserError for ranges that end before they begin."""
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if low > high:
                raise UserError(f"data.augment.{name}=[{low:g},{high:g}]: give the lower end first")


@dataclass(frozen=True)
class DataConfig:
    """Where the training samples come from, and how they are read."""

    train: list[str] | None = setting(
        None, "Shards: brace lists, globs, `@FILE` listing shards, folders, URLs; several are several sources."
    )
    weights: list[float] | None = setting(
        None, "Each source's share of the samples, drawn with replacement; null: by samples."
    )
    order: str = setting(
        "auto",
        "`epochs`: each sample once; `resampled`: shards drawn with replacement; `auto`: epochs, if counts are known.",
        choices=("auto", "epochs", "resampled"),
    )
    workers: int | None = setting(
        None,
        "Loader processes per rank, at most one per shard stream; null: the rank's cores less one, and at least 1; "
        "0: the training process decodes.",
        least=0,
        changes_weights=False,
    )
    shard_streams: int | None = setting(
        None,
        "Number of shard streams, whose samples are interleaved in the global order; null: 64, or what batch and ranks "
        "need.",
        least=1,
    )
    shuffle: int = setting(256, "Samples in each shard stream's shuffle window, undecoded; 0: shard order.", least=0)
    buffers: int = setting(
        2, "Local batches in host memory; with 1, the next batch is loaded only after the step.", least=1
    )
    captions: list[str] = setting(
        ["txt"],
        "Where the caption is: `txt`, or `json:FIELD`; with weights, one is drawn per sample: `[txt=1,json:alt=3]`. "
        "`txt@sentence`: a random sentence; `@span`: sentences that fit the context, from a random one on; `@later`: "
        "the same without the first sentence.",
    )
    captions_per_step: int = setting(
        1, "Captions of each sample in a step, drawn without replacement; its picture is encoded once.", least=1
    )
    negatives: str | None = setting(
        None,
        "Field with a sample's hard negatives (a text or a list): `json:FIELD`. They are negatives of every picture.",
    )
    negatives_per_step: int = setting(
        1,
        "Hard negatives of each sample in a step, drawn as captions are; repeated if there are fewer. A sample without "
        "any is left out.",
        least=1,
    )
    same: str | None = setting(
        None, "Samples with the same `caption`, or the same json field (`url`, ...), are not negatives of each other."
    )
    only_keys: str | None = setting(
        None,
        "Use only the samples in a file: DataComp's uids (`FILE.npy`, dtype `u8,u8`, sorted), or keys, one a line.",
    )
    sample_weights: str | None = setting(
        None,
        "How often each sample comes in an epoch: a Parquet file of `key` or DataComp's `uid`, and `weight`; 0: never.",
    )
    filter: list[str] = setting(
        [],
        "Conditions on samples: `width`, `height`, shorter `side`, `aspect` (longer over shorter), characters of a "
        "`caption`, fields of the json, the name of a `sample`: `[side>=64,similarity>=0.3,LANGUAGE=en|de]`, "
        "`sample!=00012.tar/000123456`.",
    )
    augment: AugmentConfig = section(AugmentConfig)
    timeout_s: float = setting(
        300.0, "Seconds without progress after which a worker ends the run.", above=0, changes_weights=False
    )

    @property
    def text_layout(self) -> TextLayout:
        """The captions and hard negatives of a batch."""
        return TextLayout(self.captions_per_step, self.negatives_per_step if self.negatives else 0)

    def check(self) -> None:
        """Raise UserError for captions and conditions that cannot be read, and for weights."""
        self.check_weights()
        if self.only_keys is not None and self.sample_weights is not None:
            raise UserError("data.only_keys and data.sample_weights exclude each other; give weights of 0")
        parse_caption_sources(self.captions)
        parse_conditions(self.filter)
        if self.negatives and not re.fullmatch("json:.+", self.negatives):
            raise UserError(f"data.negatives={self.negatives}: name the field that has the texts, json:FIELD")
        if self.negatives and (self.same is not None or self.sample_weights is not None):
            raise UserError(
                f"data.negatives={self.negatives}: not with data.same or data.sample_weights, which say nothing of "
                "these texts; leave one of them out"
            )
        if self.captions_per_step > 1 and self.same == "caption":
            raise UserError(
                f"data.captions_per_step={self.captions_per_step}: data.same=caption compares one caption of each; "
                "take data.same=url, or another field"
            )

    def check_weights(self) -> None:
        """Raise UserError for other weights than sources, and for negative ones."""
        if self.weights is None or self.train is None:
            return
        weights = list(self.weights)
        sources = len(self.train)
        if len(weights) != sources:
            raise UserError(f"data.weights={weights}: {len(weights)} weights for {sources} sources in data.train")
        if min(weights) < 0 or sum(weights) <= 0:
            raise UserError(f"data.weights={weights}: must be non-negative and not all zero")
