"""Whole runs with pixels on disk or as encoded pictures, with a growing batch, and from stored features: the same training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clipscale.common.errors import UserError
from clipscale.config.data import AugmentConfig, DataConfig
from clipscale.config.sections import CacheConfig, LaunchConfig, RampConfig, ScheduleConfig
from clipscale.config.train import TrainConfig
from clipscale.data.tools.demo import paths
from clipscale.launch.local import run as launch_run
from clipscale.train import Run, distributed, train
from tests.support.runs import curve, settings


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def augmented(demo: Path, run: Path, workers: int = 0, **changes: Any) -> TrainConfig:
    data = DataConfig(train=[paths(demo).train], workers=workers, augment=AugmentConfig(scale=(0.3, 1.0), flip=0.5))
    return settings(demo, run, data=data, **{"samples": 256, **changes})


@pytest.fixture(scope="module")
def host(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run = tmp_path_factory.mktemp("runs") / "host"
    train(augmented(demo, run))
    return curve(run)


@pytest.mark.parametrize(
    ("offload", "workers", "keep"),
    [
        ("disk", 0, "none"),
        pytest.param("encoded", 2, "none", marks=pytest.mark.slow),
        ("encoded", 0, "2M"),
        ("none", 0, "none"),
    ],
)
def test_where_pixels_wait_does_not_change_a_bit_of_the_curve(
    demo: Path, host: list[float], tmp_path: Path, offload: str, workers: int, keep: str
) -> None:
    cache = CacheConfig(image_chunk=24, text_chunk=32, keep=keep)
    train(augmented(demo, tmp_path / "run", workers, offload=offload, cache=cache))
    found = curve(tmp_path / "run")
    assert found == (host if keep == "none" else pytest.approx(host, rel=1e-5))


def test_a_full_disk_leaves_the_checkpoints(demo: Path, tmp_path: Path) -> None:
    train(augmented(demo, tmp_path / "run", samples=128, schedule=ScheduleConfig(name="constant", warmup="0")))
    before = sorted((tmp_path / "run/checkpoints").iterdir())
    config = augmented(demo, tmp_path / "run", schedule=ScheduleConfig(name="constant", warmup="0"))
    with pytest.raises(UserError, match=r"offload_dir=/nowhere: .*offload=encoded"):
        train(replace(config, offload="disk", offload_dir="/nowhere"))
    assert sorted((tmp_path / "run/checkpoints").iterdir()) == before
    assert train(replace(config, offload="disk"))["step"] == 4, "and the run goes on with another backend"


# -- ramp --------------------------------------------------------------------------------------------------------------


def growing(demo: Path, run: Path, **changes: Any) -> TrainConfig:
    data = DataConfig(train=[paths(demo).train], workers=0, shard_streams=16)
    return settings(demo, run, **{"ramp": RampConfig(16, 256), "data": data, "samples": 640, **changes})


def test_a_growing_batch_is_counted_and_scheduled_by_samples(demo: Path, tmp_path: Path) -> None:
    train(growing(demo, tmp_path / "run"))
    found = records(tmp_path / "run")
    assert [r["batch"] for r in found] == [16] * 6 + [32] * 3 + [48] * 2 + [64] * 5
    seen = 0
    for record in found:
        seen += record["batch"]
        assert record["samples"] == seen
    plain = Run(settings(demo, tmp_path / "plain", samples=640), distributed.start("cpu"))
    plain.stream.close()
    for record in found:
        if record["samples"] % 64 == 0:  # where both have seen as many, they are at the same place of the schedule
            assert record["lr"] == pytest.approx(plain.schedule.lr(record["samples"] // 64 - 1)), record["samples"]


@pytest.mark.slow
def test_a_ramp_goes_on_after_a_stop(demo: Path, tmp_path: Path) -> None:
    constant = {"schedule": ScheduleConfig(name="constant", warmup="0")}
    train(growing(demo, tmp_path / "whole", samples=320, **constant))
    train(growing(demo, tmp_path / "run", samples=100, **constant))
    half = len(records(tmp_path / "run"))
    assert 0 < half < 10
    train(growing(demo, tmp_path / "run", samples=320, **constant))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole"), f"stopped after step {half}"


@pytest.mark.slow
def test_ranks_share_a_growing_batch(demo: Path, tmp_path: Path) -> None:
    train(growing(demo, tmp_path / "one", samples=320))
    ranks = {"launch": LaunchConfig(procs=2), "cache": CacheConfig(chunk="12")}
    launch_run(growing(demo, tmp_path / "two", samples=320, **ranks))
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), rel=1e-4)
