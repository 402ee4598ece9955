"""How a run begins: its model, optimizer and data, from a checkpoint or anew."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from clipscale import checkpoint
from clipscale.common.rng import RandomState
from clipscale.config.train import TrainConfig
from clipscale.data.loader.host_batch import Offload
from clipscale.data.loader.memory import free_memory
from clipscale.data.loader.offload import row_kind
from clipscale.data.loader.ramp import BatchSizes
from clipscale.data.loader.stream import BatchShare, TrainStream, merge_positions, open_stream
from clipscale.distributed.world import World
from clipscale.models.weights import described
from clipscale.state.train_state import TrainState


@dataclass
class Started:
    """What a run goes on with after `step` steps, the last of which had `loss`."""

    state: TrainState
    stream: TrainStream
    resumed: bool = False
    step: int = 0
    loss: float = math.nan


def start(config: TrainConfig, world: World, folder: Path, sizes: BatchSizes) -> Started:
    """Make model, optimizer and data stream. The order of their sources:

    1. `resume=auto`, the default: the newest readable checkpoint in the run's own folder.
    2. `resume=PATH`: that checkpoint, or the newest one of that run folder.
    3. Without a checkpoint, or with `resume=none`: the initial weights `model.weights` and those of the towers.
    4. Without these: random weights, by `seed`.
    """
    path = checkpoint.to_resume(folder, config.resume, world)  # 1 and 2
    source = checkpoint.Saved(path) if path else None
    saved = source.values if source else None
    checkpoint.check_fits(saved, folder, config, sizes.before)
    model = world.on_main(lambda: described(config.model, saved))  # the pixels of 1, 2 or 3
    state = TrainState(
        replace(config, model=model), world, folder, source
    )  # 3 and 4 inside, before the checkpoint's weights
    if model != config.model:
        state.notes.append(f"pixels are normalised as for the weights: mean {[*model.mean]}, deviation {[*model.std]}")
    stream = data_stream(state, sizes, saved)
    begun = Started(state, stream)
    merge_positions(world.gather(stream.position()))  # refuses shards that differ between the ranks
    torch.manual_seed(config.seed + 1 + world.rank)
    if saved is None:
        return begun
    begun.resumed, begun.step, begun.loss = True, saved["step"], saved["loss"]
    if len(saved["random"]) == world.size:
        own = saved["random"][world.rank]
        RandomState(own["cpu"], own["cuda"] if world.device.type == "cuda" else None).restore()
    else:  # another number of ranks: new random numbers, which differ at every resume
        torch.manual_seed(config.seed + 1 + world.rank + begun.step * world.size)
    return begun


def data_stream(state: TrainState, sizes: BatchSizes, saved: dict[str, Any] | None) -> TrainStream:
    """The data, from its start or from a checkpoint's position."""
    config, world = state.config, state.world
    first = 0 if saved is None else saved["step"]
    backend = config.offload if config.offload != "none" else "host"
    free = free_memory()
    world.gather(None)  # all ranks have looked before the first takes its share
    return open_stream(
        config.data,
        BatchShare(config.batch, world.rank, world.size, sizes=lambda i: sizes.at(first + i)),
        row_kind(config.data, state.image_size(), state.stored),
        state.model.tokenizer,
        config.seed,
        position=None if saved is None else saved["position"],
        offload=Offload(
            backend, state.cache.towers[0].size, config.offload_dir or str(state.folder), world.device.type == "cuda"
        ),
        free=free,
    )
