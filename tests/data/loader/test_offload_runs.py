"""Whole runs with pixels on disk or as encoded pictures, and with a growing batch: the same training."""

import json
from pathlib import Path
from typing import Any

import pytest

from clipscale.config.data import AugmentConfig, DataConfig
from clipscale.config.sections import CacheConfig, ScheduleConfig
from clipscale.config.train import TrainConfig
from clipscale.data.tools.demo import paths
from clipscale.train import train
from tests.support.runs import curve, settings

CONSTANT = {"schedule": ScheduleConfig(name="constant", warmup="0")}


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def augmented(demo: Path, run: Path, workers: int = 0, **changes: Any) -> TrainConfig:
    data = DataConfig(train=[paths(demo).train], workers=workers, augment=AugmentConfig(scale=(0.3, 1.0), flip=0.5))
    return settings(demo, run, data=data, **{"samples": 256, **changes})


def test_where_pixels_wait_does_not_change_a_bit_of_the_curve(demo: Path, tmp_path: Path) -> None:
    cases = [
        ("host", 0, "none"),
        ("disk", 0, "none"),
        ("encoded", 2, "none"),
        ("none", 0, "none"),
        ("encoded", 0, "2M"),
    ]
    for offload, workers, keep in cases:
        run = tmp_path / f"{offload}-{keep}"
        cache = CacheConfig(image_chunk=24, text_chunk=32, keep=keep)
        train(augmented(demo, run, workers, offload=offload, cache=cache))
        expected = curve(tmp_path / "host-none")
        assert curve(run) == (expected if keep == "none" else pytest.approx(expected, rel=1e-5)), run.name
