"""How a run begins: its model, optimizer and data, from a checkpoint or anew."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.common.rng import RandomState
from clipscale.common.terminal import say
from clipscale.config.stages import stages_of
from clipscale.config.train import TrainConfig, shared
from clipscale.data.columns import columns_of
from clipscale.data.loader.host_batch import Offload
from clipscale.data.loader.memory import free_memory
from clipscale.data.loader.stream import BatchShare, TrainStream, merge_positions, open_stream
from clipscale.distributed.world import World
from clipscale.models.towers import architecture
from clipscale.models.weights import described
from clipscale.state.train_state import TrainState
from clipscale.step.chunk_sizes import sizes_of_settings
from clipscale.step.optim import known_optimizer


class Stage(NamedTuple):
    """A part of a run, or all of it."""

    config: TrainConfig
    first: int  # step of the run
    earlier: int  # samples of the run before it
    last: bool

    def seen(self, step: int) -> int:
        """Samples of the run before a step."""
        return self.earlier + (step - self.first) * self.config.batch

    def samples(self, epoch: int | None) -> int:
        """The samples of the stage, `epoch`: those of an epoch. Raises UserError for less than a batch."""
        samples = self.config.samples
        if samples is None:
            assert self.config.epochs is not None
            if epoch is None:
                raise UserError(f"epochs={self.config.epochs}: the samples of an epoch are not known; give samples=N")
            samples = round(self.config.epochs * epoch)
        if samples < self.config.batch:
            raise UserError(f"samples={samples} is less than one batch={self.config.batch}; nothing would be trained")
        return samples


def begin(config: TrainConfig, world: World, folder: Path) -> tuple[Stage, TrainState, TrainStream, int, float]:
    """The stage of the run; its model, optimizer and data stream; the steps that are done, and the loss of the last.

    A stage begins with the checkpoint at the end of the one before. The order of sources:

    1. `resume=auto`, the default: the newest readable checkpoint in the run's own folder.
    2. `resume=PATH`: that checkpoint, or the newest one of that run folder.
    3. Without a checkpoint, or with `resume=none`: the initial weights `model.weights` and those of the towers.
    4. Without these: random weights, by `seed`.
    """
    stages = planned(config, world)
    # Started again, by torchrun after a failure or by Slurm from its queue: the run goes on from its own checkpoint.
    restarted = any(int(os.environ.get(f"{by}_RESTART_COUNT", "0")) for by in ("TORCHELASTIC", "SLURM"))
    path = checkpoint.to_resume(folder, "auto", world) if restarted else None
    path = path or checkpoint.to_resume(folder, config.resume, world)  # 1 and 2
    saved = checkpoint.read_values(path) if path else None
    step = saved["step"] if saved else 0
    number = sum(stage.first <= step for stage in stages) - 1
    stage = stages[number]
    config, begins = stage.config, number > 0 and step == stage.first
    of_checkpoint = stages[number - begins]
    checkpoint.check_fits(saved, folder, of_checkpoint.config, of_checkpoint.seen)
    model = world.on_main(lambda: described(config.model, saved))  # the pixels of 1, 2 or 3
    if begins:
        model = replace(model, image_size=config.model.image_size, context_length=config.model.context_length)
    optimizer = config.stages[number].get("optimizer", "continue") if begins else ""
    state = TrainState(replace(config, model=model), world, path, optimizer)  # 3 and 4, then the checkpoint's weights
    if world.main and model != config.model:
        say(f"pixels are normalised as for the weights: mean {[*model.pixels.mean]}, deviation {[*model.pixels.std]}")
    if world.main and state.captions.note:
        say(state.captions.note)
    stream = data_stream(state, saved)
    streams = merge_positions(world.gather(stream.position()))["streams"]  # refuses shards that differ between ranks
    batches = {stage.config.batch for stage in stages}
    if len(batches) > 1 and (fitting := math.gcd(streams, *batches)) < streams:
        found = f"batches of {sorted(batches)} are not all multiples of the {streams} shard streams of the data"
        raise UserError(f"stages: {found}; choose others, or set data.shard_streams={fitting}")
    restore_random(saved, config.seed, world)
    return stage, state, stream, step, saved["loss"] if saved else math.nan


def planned(config: TrainConfig, world: World) -> list[Stage]:
    """The stages of a run, or the run itself. Raises UserError for one that cannot be."""
    stages, step, samples, settings = [], 0, 0, stages_of(config)
    for number, part in enumerate(settings, 1):
        check_machine(part, world)
        stages.append(Stage(part, step, samples, last=number == len(settings)))
        if config.stages:
            architecture(part.model)
            step += stages[-1].samples(None) // part.batch
            samples = stages[-1].seen(step)
    return stages


def check_machine(config: TrainConfig, world: World) -> None:
    """Raise UserError for settings that this machine or a library refuses, before a model is built."""
    shared(config.batch, world.size, f"{world.size} processes")
    known_optimizer(config.optim)
    sizes_of_settings(config.cache, config.batch // world.size, config.data.captions_per_step)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if config.loss.backend == "triton" and world.device.type == "cpu" and not interpreted:
        raise UserError("loss.backend=triton needs a GPU, and the device is the CPU; take loss.backend=tiled, or auto")


def restore_random(saved: dict[str, Any] | None, seed: int, world: World) -> None:
    """The random state of this rank.

    Over another number of ranks than the checkpoint's it is seeded anew, differently at each step.
    """
    torch.manual_seed(seed + 1 + world.rank + (saved["step"] * world.size if saved else 0))
    if saved and len(saved["random"]) == world.size:
        state = saved["random"][world.rank]  # of a run on a CPU it has none for a GPU
        RandomState(state["cpu"], state["cuda"] if world.device.type == "cuda" else None).restore()


def data_stream(state: TrainState, saved: dict[str, Any] | None) -> TrainStream:
    """The data, from its start or from a checkpoint's position. Raises UserError."""
    config, world = state.config, state.world
    if state.stored and config.offload == "encoded":
        raise UserError("offload=encoded is for pictures; with data.image_features take offload=host")
    backend = config.offload if config.offload != "none" else "host"
    free = free_memory()
    world.gather(None)  # all ranks have looked before the first takes its share
    return open_stream(
        config.data,
        BatchShare(config.batch, world.rank, world.size),
        columns_of(config.data, state.model.image_size, state.stored, state.teachers),
        state.model.tokenizer,
        config.seed,
        position=saved["position"] if saved else None,
        offload=Offload(backend, state.chunks["image"], world.device.type == "cuda"),
        free=free,
    )
