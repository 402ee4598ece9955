"""How a run begins: its model, optimizer and data, from a checkpoint or anew."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.common.rng import RandomState
from clipscale.common.terminal import say
from clipscale.config.train import TrainConfig
from clipscale.data.loader.host_batch import Offload
from clipscale.data.loader.memory import free_memory
from clipscale.data.loader.offload import row_kind
from clipscale.data.loader.ramp import BatchSizes
from clipscale.data.loader.stream import BatchShare, TrainStream, merge_positions, open_stream
from clipscale.distributed.world import World
from clipscale.models.weights import described
from clipscale.state.train_state import TrainState
from clipscale.step.chunk_sizes import sizes_of_settings
from clipscale.step.optim import known_optimizer


def begin(
    config: TrainConfig, world: World, folder: Path, sizes: BatchSizes
) -> tuple[TrainState, TrainStream, int, float]:
    """Model, optimizer and data stream; the steps that are done, and the loss of the last. The order of their sources:

    1. `resume=auto`, the default: the newest readable checkpoint in the run's own folder.
    2. `resume=PATH`: that checkpoint, or the newest one of that run folder.
    3. Without a checkpoint, or with `resume=none`: the initial weights `model.weights` and those of the towers.
    4. Without these: random weights, by `seed`.
    """
    check_machine(config, world)
    # Started again, by torchrun after a failure or by Slurm from its queue: the run goes on from its own checkpoint.
    restarted = any(int(os.environ.get(f"{by}_RESTART_COUNT", "0")) for by in ("TORCHELASTIC", "SLURM"))
    path = checkpoint.to_resume(folder, "auto", world) if restarted else None
    path = path or checkpoint.to_resume(folder, config.resume, world)  # 1 and 2
    saved = checkpoint.read_values(path) if path else None
    checkpoint.check_fits(saved, folder, config, sizes.before)
    model = world.on_main(lambda: described(config.model, saved))  # the pixels of 1, 2 or 3
    state = TrainState(replace(config, model=model), world, path)  # 3 and 4, then the checkpoint's weights
    if world.main and model != config.model:
        say(f"pixels are normalised as for the weights: mean {[*model.mean]}, deviation {[*model.std]}")
    if world.main and state.captions.note:
        say(state.captions.note)
    stream = data_stream(state, sizes, saved, folder)
    merge_positions(world.gather(stream.position()))  # refuses shards that differ between the ranks
    restore_random(saved, config.seed, world)
    return (state, stream, saved["step"], saved["loss"]) if saved else (state, stream, 0, math.nan)


def check_machine(config: TrainConfig, world: World) -> None:
    """Raise UserError for settings that this machine or a library refuses, before a model is built."""
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


def data_stream(state: TrainState, sizes: BatchSizes, saved: dict[str, Any] | None, folder: Path) -> TrainStream:
    """The data, from its start or from a checkpoint's position. Raises UserError."""
    config, world = state.config, state.world
    if state.stored and config.offload == "encoded":
        raise UserError("offload=encoded is for pictures; with data.image_features take offload=host, or disk")
    first = saved["step"] if saved else 0
    backend = config.offload if config.offload != "none" else "host"
    free = free_memory()
    world.gather(None)  # all ranks have looked before the first takes its share
    return open_stream(
        config.data,
        BatchShare(config.batch, world.rank, world.size, sizes=lambda i: sizes.at(first + i)),
        row_kind(config.data, state.model.image_size, state.stored),
        state.model.tokenizer,
        config.seed,
        position=saved["position"] if saved else None,
        offload=Offload(backend, state.chunks["image"], config.offload_dir or str(folder), world.device.type == "cuda"),
        free=free,
    )
