"""How a run starts: resolve its settings and its checkpoint, then build data, model and optimizer."""

import math
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from clipscale import checkpoint
from clipscale.checkpoint import Saved
from clipscale.common import ranks
from clipscale.common.errors import UserError
from clipscale.common.rng import RandomState
from clipscale.common.terminal import doing, tell
from clipscale.config.stages import stages_of
from clipscale.config.train import TrainConfig, check_divisible, crowded, samples_of
from clipscale.data.loader.memory import free_memory
from clipscale.data.loader.stream import TrainStream, merge_positions, open_stream, ordered_shards
from clipscale.data.order import BatchShare
from clipscale.data.shards.subset import subset_of
from clipscale.distributed.world import World
from clipscale.models.families import family_of
from clipscale.models.tokenizer import Tokenizer
from clipscale.models.towers import architecture, build_model, inputs_of
from clipscale.models.weights import completed_by_weights
from clipscale.state.train_state import build_step, least_saved_bytes, load
from clipscale.step.batch_loss import BatchLoss
from clipscale.step.chunk_sizes import ChunkSizes, check_sizes
from clipscale.step.precision import Precision
from clipscale.step.train_step import TrainStep


@dataclass(frozen=True)
class Stage:
    """One stage of a run; a run without stages is one."""

    config: TrainConfig
    # Its first step, counted from 0 in the run.
    first: int
    # Samples of the stages before it.
    first_sample: int
    last: bool
    # Whether its first step continues the optimizer's state (`continue`) or drops it (`restart`).
    optimizer: str

    def samples_before(self, step: int) -> int:
        """Samples that the run has trained on when it has completed `step` steps."""
        return self.first_sample + (step - self.first) * self.config.batch


@dataclass(frozen=True)
class Resolved:
    """A start of a run with all settings final, before anything is built."""

    # The settings of this stage, completed by what the weights say of architecture and pictures.
    config: TrainConfig
    stages: tuple[Stage, ...]
    stage: Stage
    # The checkpoint to resume; None: the run is new.
    checkpoint: Path | None
    # The checkpoint's values, without tensors.
    saved: Saved | None
    # Whether the checkpoint is the end of the previous stage.
    is_stage_start: bool
    # The settings of all stages, for config.yaml.
    config_to_save: TrainConfig

    @property
    def step(self) -> int:
        """Completed steps."""
        return self.saved.step if self.saved else 0

    @property
    def loss(self) -> float:
        """The last completed step's loss; NaN: there is none."""
        return self.saved.loss if self.saved else math.nan

    @property
    def folder(self) -> Path:
        return Path(self.config.run)


def resolve(config: TrainConfig, world: World, *, fetches: bool) -> Resolved:
    """Find the run's checkpoint and its current stage, and complete its settings. Raises UserError.

    `fetches`: take the checkpoint of `checkpoint.copy` if it is newer than those of the run's folder.

    The weights come from the first of these that exists:

    1. `resume=auto`, the default: the newest readable checkpoint in the run's own folder.
    2. `resume=PATH`: that checkpoint, or the newest one of that run folder.
    3. The initial weights `model.weights` and those of the towers.
    4. Random weights, by `seed`.
    """
    path = checkpoint_of(config, world, config.checkpoint.copy if fetches else "")
    saved = checkpoint.read_values(path) if path else None
    if not config.model.name:
        config = replace(config, model=world.on_main(lambda: completed_by_weights(config.model, saved)))
    stages = resolved_stages(config, world)
    step = saved.step if saved else 0
    number = max(i for i, stage in enumerate(stages) if stage.first <= step)
    stage = stages[number]
    begins = number > 0 and step == stage.first
    trained = stages[number - 1] if begins else stage
    checkpoint.check_fits(saved, Path(config.run), trained.config, trained.samples_before)
    model = world.on_main(lambda: completed_by_weights(stage.config.model, saved))
    if begins:
        sizes = stage.config.model
        model = replace(model, image_size=sizes.image_size, context_length=sizes.context_length)
    settings = replace(stage.config, model=model)
    config_to_save = config if config.stages else settings
    return Resolved(settings, tuple(stages), stage, path, saved, begins, config_to_save)


def checkpoint_of(config: TrainConfig, world: World, copy: str) -> Path | None:
    """The checkpoint to resume; after a restart by torchrun or Slurm, the run's own newest one if there is any.

    `copy`: the address of the run's copy; empty: none is looked at.
    """
    folder = Path(config.run)
    restarts = [ranks.number(f"{launcher}_RESTART_COUNT", 0) for launcher in ("TORCHELASTIC", "SLURM")]
    # Of all ranks: an agent does not count the restarts that another node's fault causes.
    restarted = any(world.all_gather_object(any(restarts)))
    newest = checkpoint.to_resume(folder, "auto", world, copy) if restarted else None
    return newest or checkpoint.to_resume(folder, config.resume, world, copy)


def build(resolved: Resolved, world: World) -> tuple[TrainStep, TrainStream]:
    """Open the data, build model and optimizer, and restore this rank's random state. Raises UserError.

    Data workers start first: they read while the model is built.
    """
    config = resolved.config
    side, tokenizer = inputs_of(config.model)
    with ExitStack() as undo:
        doing("opening the shards")
        stream = undo.enter_context(data_stream(resolved, side, tokenizer, world))
        if not resolved.checkpoint:
            world.on_main(lambda: checkpoint.check_room(resolved.folder, least_saved_bytes(config)))
        doing("building the model")
        step = initial_step(resolved, world, tokenizer)
        tell_notices(resolved, stream, world)
        check_streams(resolved, stream, world)
        restore_random(resolved, world)
        undo.pop_all()
    return step, stream


def initial_step(resolved: Resolved, world: World, tokenizer: Tokenizer) -> TrainStep:
    """The step with the initial weights, or with the checkpoint's. Raises UserError."""
    config = resolved.config
    torch.manual_seed(config.seed)
    model = build_model(config.model, tokenizer=tokenizer).to(world.device)
    sort_captions = family_of(model.text.encoder).ignores_padding(model.text.encoder)
    subset = subset_of(config.data)
    precision = Precision(config.precision, world.device)
    loss = BatchLoss(config, model, precision, repeats=subset is not None and subset.table.max_copies > 1)
    earlier = ChunkSizes(**resolved.saved.chunks) if resolved.saved and not resolved.is_stage_start else None
    step = build_step(config, world, model, loss, sort_captions=sort_captions, earlier=earlier)
    if resolved.checkpoint:
        saved = checkpoint.load(resolved.checkpoint, verified=True, like=dict(model.named_parameters()))
        load(step, saved, resolved.stage.optimizer if resolved.is_stage_start else "")
    return step


def tell_notices(resolved: Resolved, stream: TrainStream, world: World) -> None:
    """Print, on rank 0, what the user should know of model and data."""
    if not world.is_rank0:
        return
    pixels = resolved.config.model.pixels
    if pixels != resolved.stage.config.model.pixels:
        tell(f"pixels are normalised as for the weights: mean {[*pixels.mean]}, deviation {[*pixels.std]}")
    if warning := crowded(resolved.config, stream.samples_per_epoch):
        tell(f"warning: {warning}", error=True)


def check_streams(resolved: Resolved, stream: TrainStream, world: World) -> None:
    """Raise UserError if ranks read different shards, or if the shard streams do not divide a stage's batch."""
    streams = merge_positions(world.all_gather_object(stream.position()))["streams"]
    divisor = largest_divisor(resolved, streams)
    if divisor < streams:
        batches = sorted({stage.config.batch for stage in resolved.stages})
        raise UserError(
            f"stages: batches of {batches} are not all multiples of the {streams} shard streams of the data; choose "
            f"others, or set data.shard_streams={divisor}"
        )


def resolved_stages(config: TrainConfig, world: World) -> list[Stage]:
    """The stages of a run; without stages, the run as one. Raises UserError for settings that cannot work."""
    stages: list[Stage] = []
    step = samples = 0
    settings = stages_of(config)
    for number, part in enumerate(settings):
        check_machine(part, world)
        optimizer = config.stages[number].get("optimizer", "continue") if config.stages else "continue"
        stage = Stage(part, step, samples, number == len(settings) - 1, optimizer)
        stages.append(stage)
        if config.stages:
            architecture(part.model)
            step += samples_of(part, None) // part.batch
            samples = stage.samples_before(step)
    return stages


def check_machine(config: TrainConfig, world: World) -> None:
    """Raise UserError for settings that cannot work on this machine, before a model is built."""
    check_divisible(config.batch, world.size, f"{world.size} processes")
    check_sizes(config.cache, config.batch // world.size)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if config.loss.backend == "triton" and world.device.type == "cpu" and not interpreted:
        raise UserError("loss.backend=triton needs a GPU, and the device is the CPU; take loss.backend=tiled, or auto")


def restore_random(resolved: Resolved, world: World) -> None:
    """Restore this rank's random state from the checkpoint.

    A new run, and one on another number of ranks, gets a new seed from the rank and the step.
    """
    torch.manual_seed(resolved.config.seed + 1 + world.rank + resolved.step * world.size)
    if resolved.saved and len(resolved.saved.random) == world.size:
        state = resolved.saved.random[world.rank]  # of a run on a CPU, its `cuda` is None
        RandomState(state["cpu"], state["cuda"] if world.device.type == "cuda" else None).restore()


def largest_divisor(resolved: Resolved, streams: int) -> int:
    """The largest divisor of `streams` that divides the batches of all stages; `streams` if all batches are equal."""
    batches = {stage.config.batch for stage in resolved.stages}
    return math.gcd(streams, *batches) if len(batches) > 1 else streams


def data_stream(resolved: Resolved, side: int, tokenizer: Tokenizer, world: World) -> TrainStream:
    """The training data, from its start or from the checkpoint's position. Raises UserError."""
    config = resolved.config
    free = free_memory()
    world.all_gather_object(None)  # no rank allocates before all have read the free memory
    position = resolved.saved.position if resolved.saved else None
    share = BatchShare(config.batch, world.rank, world.size)
    shards = ordered_shards(
        config.data, share, config.seed, position, world.on_main, partial(largest_divisor, resolved)
    )
    return open_stream(
        config.data,
        share,
        side,
        tokenizer,
        shards,
        position=position,
        gpu=world.device.type == "cuda",
        free=free,
    )
