"""Writes checkpoints and results without a run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from clipscale import checkpoint
from clipscale.config.model import ModelConfig
from clipscale.distributed.world import World
from clipscale.models.towers import ClipModel
from clipscale.run_folder.paths import checkpoint_path, checkpoints_of, step_of

# A run of one process.
ONE_RANK = World(0, 1, torch.device("cpu"))


def steps(run: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    return [step_of(path) for path in checkpoints_of(run)]


def saver_of(run: Path, retention: checkpoint.Retention | None = None, world: World = ONE_RANK) -> checkpoint.Saver:
    """A saver that copies nothing. `retention`: None for the default."""
    return checkpoint.Saver(run, world, retention or checkpoint.Retention())


def save(run: Path, step: int, state: dict[str, Any], *, keep: int, keep_every: int = 0) -> Path:
    """Write a checkpoint in one process and wait for it; see `checkpoint.Saver`. Returns its folder."""
    retention = checkpoint.Retention(keep, keep_every)
    saver_of(run, retention).save(checkpoint.CheckpointState(step, **state), wait=True)
    return checkpoint_path(run, step)


def save_model(run: Path, model: ClipModel, config: ModelConfig, step: int = 7) -> None:
    """Write a checkpoint of a model alone, which `config` describes."""
    save(run, step, {"model": model.state_dict(), "model_config": asdict(config)}, keep=0)


def write_result(run: Path, step: int, value: float, metric: str = "top1") -> None:
    """Write the file that an evaluation of a step leaves."""
    (run / "eval").mkdir(exist_ok=True)
    record = {"results": {"birds": {metric: value}, "cats (ema)": {metric: value}}}
    (run / f"eval/step_{step:08d}.json").write_text(json.dumps(record))
