"""The settings of `clipscale data`."""

from dataclasses import dataclass, field
from typing import ClassVar

from clipscale.config.data import DataConfig
from clipscale.config.setting import setting


@dataclass(frozen=True)
class DemoSettings:
    """`clipscale data demo`: render a small set to try things on."""

    root: str | None = setting(None, "Folder to write; null: the user's cache folder.")
    samples: int = setting(20_000, "Training pairs to render.")


@dataclass(frozen=True)
class IndexSettings:
    """`clipscale data index SHARD...`: write an index of counts, offsets and sizes beside the shards; print counts."""

    only_keys: str | None = setting(None, "Index the subset for `data.only_keys`, instead of all samples.")


@dataclass(frozen=True)
class CheckSettings:
    """`clipscale data check SHARD...`: read and decode everything, and print what is broken."""

    ONLY: ClassVar = {
        "data": "captions filter only_keys max_pixels allow_pipe",
    }

    data: DataConfig = field(default_factory=DataConfig)
