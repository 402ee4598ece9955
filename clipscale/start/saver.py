"""Builds what saves a run's checkpoints and copies them."""

from clipscale import checkpoint
from clipscale.common.goal import Goal
from clipscale.distributed.world import World
from clipscale.run_folder.chosen_checkpoint import BestFinder
from clipscale.start.resolve import ResolvedRun


def build_saver(
    resolved: ResolvedRun, uploader: checkpoint.CheckpointUploader | None, world: World
) -> checkpoint.Saver:
    """What saves the run's checkpoints, and copies them with `checkpoint.copy`.

    `uploader`: the one of the earlier stages. If it is None and the run has a copy, a new one is made, and rank 0
    begins to copy the newest checkpoint.
    """
    settings = resolved.config.checkpoint
    best = BestFinder(resolved.run_dir, Goal.parse("checkpoint.best", settings.best)) if settings.best else None
    retention = checkpoint.Retention(settings.keep, settings.keep_every, best)
    if uploader is None and settings.copy:
        uploader = checkpoint.CheckpointUploader(resolved.run_dir, settings.copy, retention)
        if world.is_rank0:
            uploader.start()
    is_in_folder = resolved.checkpoint_path is None or resolved.continues_own_folder
    last_begun_step = resolved.step if is_in_folder else None
    return checkpoint.Saver(resolved.run_dir, world, retention, uploader, last_begun_step)
