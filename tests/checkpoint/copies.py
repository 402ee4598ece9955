"""Runs and savers whose checkpoints are copied into a store."""

import time
from pathlib import Path
from typing import Any

from clipscale import checkpoint
from clipscale.config.sections import CheckpointConfig, LaunchConfig, ScheduleConfig
from clipscale.config.train_config import TrainConfig
from clipscale.run_folder.paths import checkpoint_path
from tests.support.checkpoints import ONE_RANK
from tests.support.runs import four_step_config


def copied(shards: str, run: Path, address: object, launch: LaunchConfig) -> TrainConfig:
    """Four steps at a constant rate, of which two are a run of half the samples."""
    config = CheckpointConfig(every="1", copy=str(address))
    return four_step_config(
        shards, run, checkpoint=config, schedule=ScheduleConfig(name="constant", warmup="0"), launch=launch
    )


def copying(run: Path, store: Path, **retention: int) -> checkpoint.Saver:
    """A saver whose checkpoints are copied into the `store`."""
    kept = checkpoint.Retention(**retention)
    uploader = checkpoint.CheckpointUploader(run, f"file://{store}", kept)
    uploader.start()
    return checkpoint.Saver(run, ONE_RANK, kept, uploader)


def save(root: Path, steps: list[int], **changes: Any) -> checkpoint.Saver:
    """Write these checkpoints of `root/run`, each when the one before is in `root/store`."""
    saver = copying(root / "run", root / "store", **changes)
    for step in steps:
        saver.save(checkpoint.CheckpointState(step), wait=True)
        while not (checkpoint_path(root / "store", step) / "meta.json").exists():
            time.sleep(0.01)
    saver.uploader.finish(60)
    return saver
