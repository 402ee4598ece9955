"""Undoes an unfinished step, so that a resumed run repeats the step bit for bit."""

from collections.abc import Iterator
from contextlib import contextmanager

from clipscale.common.rng import RandomState
from clipscale.data.loader.stream import TrainStream
from clipscale.distributed.fsdp import reshard
from clipscale.distributed.world import World
from clipscale.models.towers import ClipModel
from clipscale.step.cache.pass_contexts import snapshot_batch_norm


@contextmanager
def rollback_on_error(model: ClipModel, stream: TrainStream, world: World) -> Iterator[None]:
    """Around a step: if a signal or an error ends it, restores random states and statistics, and discards the batch,
    so that the stream's position is the one before the step."""
    random = RandomState.now(world.device)
    restore_statistics = snapshot_batch_norm(model)
    try:
        yield
    except Exception:
        random.restore()
        restore_statistics()
        stream.discard_last_batch()
        reshard(model)  # the error may have left FSDP2's weights gathered
        raise
