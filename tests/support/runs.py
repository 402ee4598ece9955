"""A small whole run, its settings and its curve, for the tests that train."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from clipscale.cli.train_verb import with_defaults
from clipscale.config.checks import check_across_sections
from clipscale.config.data import DataConfig
from clipscale.config.model import ModelConfig
from clipscale.config.sections import CacheConfig, LaunchConfig, LogConfig, OptimConfig, ScheduleConfig
from clipscale.config.train_config import TrainConfig
from clipscale.data.loader import open_stream
from clipscale.distributed.world import World
from clipscale.run.train_loop import TrainLoop
from clipscale.start.start_run import start_run
from clipscale.tools.data.demo_folder import train_shards
from clipscale.train import train

ARCHITECTURE = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 30, "layers": 1, "width": 32, "head_width": 16, "patch_size": 10},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


def ten_step_config(demo: Path, run: Path, **changes: Any) -> TrainConfig:
    """A run of ten steps of 64 in chunks of 24 and 32, with every part that could break exactness at work.

    Shuffle windows hold 8 samples: 64 streams with larger ones would read 2,500 samples before the first step.
    """
    base = TrainConfig(
        batch=64,
        samples=640,
        run=str(run),
        seed=3,
        device="cpu",
        model=ModelConfig(name="test", architecture=ARCHITECTURE),
        data=DataConfig(train=[train_shards(demo)], workers=0),
        cache=CacheConfig(chunk=["24", "32"]),
        optim=OptimConfig(lr=1e-3),
        schedule=ScheduleConfig(warmup="2"),
        log=LogConfig(every=5),
        launch=LaunchConfig(),
        precision="fp32",
        plan=False,
    )
    config = replace(base, **changes)
    config = replace(config, data=replace(config.data, shuffle=8))
    check_across_sections(config)
    return with_defaults(config)


def train_loop(config: TrainConfig, world: World) -> TrainLoop:
    """A run before its next step. The caller closes its stream."""
    return start_run(config, world)


def loop_with_batches(config: TrainConfig, world: World, batches: int) -> TrainLoop:
    """A run before its next step, with memory for so many batches, which have all arrived."""
    layout = open_stream.layout_of
    with patch.object(open_stream, "layout_of", lambda *given: replace(layout(*given), slots=batches)):
        loop = train_loop(config, world)
    for step in range(batches):
        loop.stream.wait_for_batch(step)
    return loop


def four_step_config(shards: str, run: Path, **changes: Any) -> TrainConfig:
    """Four steps of 12 in chunks of 4 and 6."""
    return ten_step_config(
        run,
        run,
        **{
            "data": DataConfig(train=[shards], workers=0),
            "batch": 12,
            "samples": 48,
            "cache": CacheConfig(chunk=["4", "6"]),
            "optim": OptimConfig(lr=1e-3, clip_norm=0.5),
            "precision": "bf16",
        }
        | changes,
    )


def records(run: Path) -> list[dict[str, Any]]:
    """What a run has logged, step by step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def curve(run: Path) -> list[float]:
    """The losses of a run, step by step."""
    actual = records(run)
    assert [r["step"] for r in actual] == list(range(1, len(actual) + 1)), "one line a step, in order"
    return [r["loss"] for r in actual]


def train_on_rank(rank: int, world_size: int, config: TrainConfig) -> None:
    train(config)
