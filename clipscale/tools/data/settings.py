"""The settings of `clipscale data`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.config.sections import DEVICE_HELP, DEVICES
from clipscale.config.setting import section, setting


@dataclass(frozen=True)
class DemoSettings:
    """`clipscale data demo`: render a small set to try things on, in the user's cache folder."""


@dataclass(frozen=True)
class IndexSettings:
    """`clipscale data index SHARD...`: write an index of counts, offsets and sizes beside the shards; print counts."""

    only_keys: str | None = setting(None, "Index the subset for `data.only_keys`, instead of all samples.")
    sample_weights: str | None = setting(None, "Index what `data.sample_weights` takes, instead of all samples.")


@dataclass(frozen=True)
class HoldoutSettings:
    """What goes to DIR/holdout, to be evaluated; `holdout=1%` is short for `holdout.share=1%`."""

    share: str = setting("0%", "Share of the pictures that is held out: `1%`.")
    by: str | None = setting(
        None,
        "A table's column, such as an article's number: rows of the same value are on one side; null: pictures of the "
        "same bytes are.",
    )

    def check(self) -> None:
        """Raise UserError."""
        if not re.fullmatch(r"\d{1,2}(\.\d+)?%", self.share):
            raise UserError(f"holdout={self.share}: give a share below 100%, as in holdout=1%")
        if self.by and not self.fraction:
            raise UserError(f"holdout.by={self.by}: nothing is held out; give a share too, holdout=1%")

    @property
    def fraction(self) -> float:
        return float(self.share.removesuffix("%")) / 100


@dataclass(frozen=True)
class PackSettings:
    """`clipscale data pack SOURCE out=DIR`: make shards of pictures and captions that lie in files or tables."""

    out: str = setting("", "Folder of the shards; a stopped command resumes there.")
    columns: list[str] | None = setting(
        None, "A table's column of pictures (paths, addresses, bytes), then those of captions; null: the usual names."
    )
    root: str | None = setting(
        None,
        "Folder below which a table and links name files, or the beginning of addresses, `s3://bucket/set`; null: the "
        "table's folder, and http(s) addresses.",
    )
    resize: int | None = setting(
        None,
        "Most pixels of a picture's shorter side; larger ones become JPEGs of this size; null: bytes are copied.",
        least=1,
    )
    splits: list[str] = setting(
        ["train", "restval"], "Splits of Karpathy's `dataset_coco.json` and `dataset_flickr30k.json` that are packed."
    )
    holdout: HoldoutSettings = field(default_factory=HoldoutSettings)


@dataclass(frozen=True)
class SelectSettings:
    """`clipscale data select FOLDER out=FILE`: choose among samples by the features that `embed` has left in FOLDER."""

    out: str = setting(
        "", "FILE.parquet for `data.sample_weights`; FILE.html beside it shows what goes and what stays."
    )
    best: float | None = setting(
        None, "Share that stays: the samples whose picture and text have the largest cosines.", above=0, most=1
    )
    duplicates: float | None = setting(
        None,
        "Cosine from which two pictures are near-duplicates; the one that fits its text better stays.",
        above=0,
        most=1,
    )
    power: float = setting(
        1.0, "A cluster of n pictures is drawn n^power times; 1: in proportion, 0: all clusters alike.", least=0, most=1
    )
    clusters: int | None = setting(None, "Clusters of the pictures; null: the square root of their number.", least=1)
    device: str = setting("auto", DEVICE_HELP, choices=DEVICES)


@dataclass(frozen=True)
class CheckSettings:
    """`clipscale data check SHARD...`: read and decode everything, and print what is broken."""

    USED_SETTINGS: ClassVar = {
        "data": "captions filter only_keys sample_weights",
    }

    data: DataConfig = section(DataConfig)


def check_select(words: Sequence[str], settings: SelectSettings) -> None:
    """Raise UserError for another file than one of Parquet, and where `embed` has left no features."""
    if not settings.out.endswith(".parquet"):
        raise UserError(f"out={settings.out}: give the file of weights to write, out=FILE.parquet")
    from clipscale.tools.embed.arrays import open_embedded_set

    open_embedded_set(Path(*words).expanduser())
