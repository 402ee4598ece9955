"""How a run starts, part 2: build. Data, model, chunk sizes, loss, passes, optimizer, average, checkpoint, compiling.

The parts get plain values, or their own section of the settings. None of them knows a whole `TrainConfig`.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from clipscale import checkpoint
from clipscale.batch.chunks import ChunkSizes
from clipscale.common.errors import UserError
from clipscale.common.memory import free_memory
from clipscale.common.rng import RandomState
from clipscale.common.terminal import log_warning, show_task
from clipscale.config.optimizer_policy import OptimizerPolicy
from clipscale.config.train_config import TrainConfig, samples_of
from clipscale.data.loader.position import merge_positions
from clipscale.data.loader.stream import TrainStream, open_stream, order_shards
from clipscale.data.order import BatchShare
from clipscale.data.shards.features import TeacherFeatures, find_teachers
from clipscale.distributed.agreement import run_long_on_rank0, run_on_rank0
from clipscale.distributed.world import World
from clipscale.models.families import may_cut_captions
from clipscale.models.flops import Flops, unbuilt_encoders
from clipscale.models.tokenizer import Tokenizer
from clipscale.models.towers import ClipModel, build_model, image_size_and_tokenizer
from clipscale.models.weights.load_weights import without_weights
from clipscale.models.weights.sources import with_checkpoints_of_runs
from clipscale.run_folder.disk import check_room
from clipscale.start.build_step import build_loss, build_step, samples_repeat
from clipscale.start.resolve import ResolvedRun
from clipscale.step.checkpoint_state import load_state
from clipscale.step.chunk_sizes import agreed_chunk_sizes
from clipscale.step.compiled import compile_towers, should_compile, try_compiled
from clipscale.step.optim import STATE_ENTRIES, Schedule
from clipscale.step.pair_encoder import pair_encoder
from clipscale.step.precision import Precision
from clipscale.step.train_step import TrainStep


@dataclass(frozen=True)
class BuiltRun:
    """What a run trains, on what data and by which schedule, ready for its next step."""

    train_step: TrainStep
    stream: TrainStream
    schedule: Schedule
    flops: Flops


def build(resolved: ResolvedRun, world: World) -> BuiltRun:
    """Open the data, build what is trained, load the checkpoint, and restore this rank's random state. A collective.

    The caller closes the stream. If this raises UserError, it has ended the data workers that it had started.
    """
    config = resolved.config
    share = BatchShare(config.batch, world.rank, world.size)
    with ExitStack() as undo:
        # Data first: its workers read while the model is built.
        show_task("opening the shards")
        image_size, tokenizer = image_size_and_tokenizer(config.model)
        teachers = run_long_on_rank0(
            world, lambda: find_teachers(config.data, config.distill.teachers, config.distill.scales)
        )
        stream = undo.enter_context(open_data(resolved, share, image_size, tokenizer, teachers, world))
        if world.size > 1:
            stream.defer_failures()
        epoch_samples = stream.epoch_samples
        schedule = Schedule.build(
            config.schedule,
            config.optim,
            config.batch,
            samples_of(config, epoch_samples),
            epoch_samples,
            resolved.stage.first_step,
        )
        if resolved.step < schedule.end:
            run_on_rank0(world, lambda: check_room(resolved.folder, least_saved_bytes(config)))

        show_task("building the model")
        torch.manual_seed(config.seed)
        if resolved.checkpoint_path:
            # It holds all weights. Those that the run began with may be gone by now.
            model_config = without_weights(config.model)
        else:
            model_config = run_on_rank0(world, lambda: with_checkpoints_of_runs(config.model))  # the same on every rank
        model = build_model(model_config, tokenizer=tokenizer).to(world.device)
        precision = Precision.set_up(config.precision, world.device)
        precision.cast_frozen_(model.image, model.text)

        # Measured before `build_step` wraps the towers: the ranks may try different numbers of sizes. Under FSDP2 each
        # try would be a collective, and a rank with one more would hang.
        chunk_sizes = choose_chunk_sizes(resolved, model, precision, share.local_batch, world)
        sorts_captions = may_cut_captions(model.text.encoder, tokenizer)
        train_step = build_step(
            config,
            world,
            model,
            precision,
            chunk_sizes,
            build_loss(config, model, precision, teachers, repeats=samples_repeat(config)),
            sorts_captions=sorts_captions,
        )
        if resolved.checkpoint_path:
            state = checkpoint.load(resolved.checkpoint_path, is_verified=True, like=dict(model.named_parameters()))
            load_state(
                train_step,
                state,
                resolved.stage.optimizer_policy if resolved.is_stage_start else OptimizerPolicy.TAKE_ALL,
            )
        check_streams(resolved, stream, world)
        restore_random(resolved, world)

        flops = Flops.of(config.model, model, world.device, config.data.text_layout.texts_per_sample)
        steps = schedule.end - resolved.step
        train_step.is_compiled = compile_if_worthwhile(
            train_step, config, flops, steps, share.local_batch, world, lengths_vary=sorts_captions
        )
        undo.pop_all()
    return BuiltRun(train_step, stream, schedule, flops)


def choose_chunk_sizes(
    resolved: ResolvedRun, model: ClipModel, precision: Precision, local_batch: int, world: World
) -> ChunkSizes:
    """The chunk sizes: of the settings, else of the checkpoint, else measured. A collective. Raises UserError."""
    config = resolved.config
    with precision.autocast():
        return agreed_chunk_sizes(
            config.cache.sizes,
            model,
            local_batch,
            world,
            resolved.resumed.chunks if resolved.resumed and not resolved.is_stage_start else None,
            keeps_graphs=config.cache.keep_bytes != 0,
            texts_per_sample=config.data.text_layout.texts_per_sample,
            pairs=pair_encoder(model) if config.trains_captioner else None,
        )


def open_data(
    resolved: ResolvedRun,
    share: BatchShare,
    image_size: int,
    tokenizer: Tokenizer,
    teachers: tuple[TeacherFeatures, ...],
    world: World,
) -> TrainStream:
    """The training data, from its start or from the checkpoint's position. A collective. Raises UserError."""
    config = resolved.config
    free = free_memory()
    world.barrier()  # no rank allocates before all have read the free memory
    position = resolved.resumed.position if resolved.resumed else None
    shards = order_shards(
        config.data,
        share,
        config.seed,
        position,
        on_rank0=partial(run_long_on_rank0, world),
        largest_divisor=resolved.largest_divisor,
        teachers=teachers,
    )
    return open_stream(
        config.data,
        share,
        image_size,
        tokenizer,
        shards,
        position=position,
        gpu=world.device.type == "cuda",
        free=free,
    )


def least_saved_bytes(config: TrainConfig) -> int:
    """A lower bound of a checkpoint's bytes.

    Counts the weights of the towers with `train=all`: all their layers train, or have adapters with `model.lora`.
    Without adapters it also counts their moving average, and the state of the optimizers in STATE_ENTRIES.
    """
    encoders = unbuilt_encoders(config.model)
    model = config.model
    towers = (encoders.visual, model.image), (encoders.text, model.text)
    size = sum(p.nbytes for tower, settings in towers if settings.groups is None for p in tower.parameters())
    if model.lora:
        return size
    copies_in_average = 1 if config.ema else 0
    return size * (1 + copies_in_average + STATE_ENTRIES.get(config.optim.name, 0))


def check_streams(resolved: ResolvedRun, stream: TrainStream, world: World) -> None:
    """Raise UserError if ranks read different shards, or if the shard streams do not divide a stage's batch."""
    num_streams = merge_positions(world.all_gather_object(stream.position())).num_streams
    divisor = resolved.largest_divisor(num_streams)
    if divisor < num_streams:
        batches = sorted({stage.global_batch for stage in resolved.stages})
        raise UserError(
            f"stages: batches of {batches} are not all multiples of the {num_streams} shard streams of the data; "
            f"choose others, or set data.shard_streams={divisor}"
        )


def restore_random(resolved: ResolvedRun, world: World) -> None:
    """Restore this rank's random state from the checkpoint.

    A new run, and one on another number of ranks, gets a new seed from the rank and the step.
    """
    torch.manual_seed(resolved.config.seed + 1 + world.rank + resolved.step * world.size)
    if resolved.resumed and len(resolved.resumed.random) == world.size:
        state = resolved.resumed.random[world.rank]  # a run on a CPU has saved no state of CUDA
        RandomState(state.cpu, state.cuda if world.device.type == "cuda" else None).restore()


def compile_if_worthwhile(
    train_step: TrainStep,
    config: TrainConfig,
    flops: Flops,
    steps: int,
    local_batch: int,
    world: World,
    *,
    lengths_vary: bool,
) -> bool:
    """Compile the towers if `model.compile` asks for it, or if the remaining `steps` are worth the time.

    `lengths_vary`: whether the chunks' captions differ in width. Returns whether the towers run compiled code from now
    on.
    """
    setting = config.model.compile
    flops_left = steps * local_batch * flops.per_sample()
    if not should_compile(setting, flops_left, flops.peak):
        return False
    show_task("compiling the towers")
    towers = compile_towers(train_step.model, lengths_vary=lengths_vary)
    problem = try_compiled(
        train_step.model,
        towers,
        train_step.chunk_sizes,
        local_batch,
        train_step.precision,
        world,
        config.data.text_layout.texts_per_sample,
    )
    if problem and world.is_rank0:
        log_warning(f"model.compile={setting}: the towers run without compiled code ({problem})")
    return not problem
