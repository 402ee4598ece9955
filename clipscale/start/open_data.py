"""The data of a run that starts, the schedule that its length decides, and the disk that its checkpoints need."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from clipscale.common.errors import UserError
from clipscale.common.memory import free_memory
from clipscale.common.terminal import show_task
from clipscale.config.train_config import TrainConfig, samples_of
from clipscale.data.loader.open_stream import open_stream, order_shards
from clipscale.data.loader.position import merge_positions
from clipscale.data.loader.stream import TrainStream
from clipscale.data.order import BatchShare
from clipscale.data.shards.features import TeacherFeatures, find_teachers
from clipscale.data.tokenizer import Tokenizer
from clipscale.distributed.agreement import run_on_rank0, run_on_rank0_with_heartbeat
from clipscale.distributed.world import World
from clipscale.models.flops import unbuilt_encoders
from clipscale.run_folder.disk import check_room
from clipscale.start.resolve import ResolvedRun
from clipscale.step.optim import Schedule, least_state_bytes


@dataclass(frozen=True)
class OpenedData:
    """The training data, and the schedule that its length decides."""

    stream: TrainStream
    schedule: Schedule
    teachers: tuple[TeacherFeatures, ...]
    local_batch: int


def open_data(resolved: ResolvedRun, image_size: int, tokenizer: Tokenizer, world: World) -> OpenedData:
    """Open the training data, at its start or at the checkpoint's position. A collective.

    The caller closes the stream. Raises UserError, also if ranks read different shards or the disk has no room for a
    checkpoint; then it has ended the data workers.
    """
    config = resolved.config
    show_task("opening the shards")
    teachers = run_on_rank0_with_heartbeat(
        world, lambda: find_teachers(config.data, config.distill.teachers, config.distill.scales)
    )
    share = BatchShare(config.batch, world.rank, world.size)
    stream = open_train_stream(resolved, share, image_size, tokenizer, teachers, world)
    with ExitStack() as undo:
        undo.callback(stream.close)
        if world.size > 1:
            stream.defer_failures()
        check_streams(resolved, stream, world)
        epoch_samples = stream.epoch_samples
        schedule = Schedule.build(
            config.schedule,
            config.optim,
            config.batch,
            samples_of(config, epoch_samples),
            epoch_samples,
            resolved.stage.steps_before,
        )
        if resolved.step < schedule.end:
            run_on_rank0(world, lambda: check_room(resolved.run_dir, least_saved_bytes(config)))
        undo.pop_all()
    return OpenedData(stream, schedule, teachers, share.local_batch)


def open_train_stream(
    resolved: ResolvedRun,
    share: BatchShare,
    image_size: int,
    tokenizer: Tokenizer,
    teachers: tuple[TeacherFeatures, ...],
    world: World,
) -> TrainStream:
    """Order the shards, and start the workers that read them. A collective. Raises UserError."""
    config = resolved.config
    free = free_memory()
    world.barrier()  # so that all ranks read the free memory before one allocates
    position = resolved.resumed.position if resolved.resumed else None
    shards = order_shards(
        config.data,
        share,
        config.seed,
        position,
        on_rank0=partial(run_on_rank0_with_heartbeat, world),
        limit_streams=resolved.limit_streams,
        teachers=teachers,
    )
    return open_stream(
        config.data,
        share,
        image_size,
        tokenizer,
        shards,
        position=position,
        pin_memory=world.device.type == "cuda",
        free_bytes=free,
    )


def check_streams(resolved: ResolvedRun, stream: TrainStream, world: World) -> None:
    """Raise UserError if ranks read different shards, or if the shard streams do not divide a stage's batch."""
    num_streams = merge_positions(world.all_gather_object(stream.position())).num_streams
    divisor = resolved.limit_streams(num_streams)
    if divisor < num_streams:
        batches = sorted({stage.global_batch for stage in resolved.stages})
        raise UserError(
            f"stages: batches of {batches} are not all multiples of the {num_streams} shard streams of the data; "
            f"choose others, or set data.shard_streams={divisor}"
        )


def least_saved_bytes(config: TrainConfig) -> int:
    """A lower bound of a checkpoint's bytes.

    Counts the weights of the towers with `train=all`: all their layers train, or have adapters with `model.lora`.
    Without adapters it also counts their moving average, and the optimizer's state.
    """
    encoders = unbuilt_encoders(config.model)
    model = config.model
    towers = (encoders.visual, model.image), (encoders.text, model.text)
    size = 0
    for tower, settings in towers:
        if settings.groups is None:
            weights = sum(p.nbytes for p in tower.parameters())
            size += weights
            if not model.lora:
                size += (weights if config.ema else 0) + least_state_bytes(tower, config.optim)
    return size
