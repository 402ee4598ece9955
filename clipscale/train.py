"""A run: find the other ranks, lock the folder, and train one stage after another.

This is one process's part; the command line starts the processes. `start/start_run.py` has the start of a run on one
page, `run/train_loop.py` its steps.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from clipscale.checkpoint import CheckpointUploader, finish_copy_on_failed_start
from clipscale.common import files
from clipscale.config.train_config import TrainConfig
from clipscale.distributed.agreement import run_on_rank0, run_on_rank0_with_heartbeat
from clipscale.distributed.join import destroy_world, init_world
from clipscale.distributed.world import World
from clipscale.loss.runtime import LossRuntime, running_on
from clipscale.run.run_lock import RunLock
from clipscale.run.stopping import COPY_WITHIN_S
from clipscale.run_folder.paths import RESULT
from clipscale.run_folder.records import RunResult
from clipscale.start.shared_storage import check_shared
from clipscale.start.start_run import start_run


def train(config: TrainConfig) -> RunResult:
    """Train as configured, from the start or from the newest checkpoint, and evaluate at the end.

    Returns {"run": folder, "step": steps done, "loss": last loss, "eval": results by set}, the same on every rank.
    Raises UserError for every mistake that the user can fix, and StoppedError after a signal.
    """
    world = init_world(config.device, config.launch.timeout_s)
    lock = RunLock(Path(config.run))
    try:
        run_on_rank0(world, lock.acquire)
        check_shared(lock.run_dir, world)
        with running_on(LossRuntime(timeout=world.timeout)):
            return train_stages(config, world, lock)
    finally:
        lock.release()
        destroy_world()


def train_stages(config: TrainConfig, world: World, lock: RunLock) -> RunResult:
    """Train one stage after another; a run without stages has one. Returns the last one's result."""
    uploader = None
    while True:
        with finish_copy_on_failed_start(uploader, world, COPY_WITHIN_S):
            loop = start_run(config, world, lock, uploader)
        result = loop.run()
        uploader = loop.saver.uploader
        if loop.stage.is_last:
            # All ranks stay: Slurm would end rank 0 two minutes after the others.
            run_on_rank0_with_heartbeat(
                world, partial(end_uploads, uploader, loop.run_dir, config.launch.timeout_s, result)
            )
            return result
        del loop  # frees its model before the next stage's is built
        config = replace(config, resume="auto")


def end_uploads(uploader: CheckpointUploader | None, run_dir: Path, limit_s: float, result: RunResult) -> None:
    """Wait for the last copy, if there is one, and then write result.json into the run's folder.

    The same command, given again, finds this file and prints the results without training.
    """
    if uploader is None or uploader.finish(limit_s, result):
        files.write_json(run_dir / RESULT, result)
