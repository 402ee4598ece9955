"""Measures the memory of real steps on the CPU by torch's profiler, which sees every allocation."""

import gc
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from clipscale.config.parse import dataclass_from
from clipscale.config.train_config import TrainConfig
from clipscale.distributed.parallel import gradient_norm
from clipscale.distributed.world import World
from clipscale.models.towers import build_model
from clipscale.start.build_step import build_step
from clipscale.step.chunk_sizes import agreed_chunk_sizes
from clipscale.step.pair_encoder import pair_encoder
from clipscale.step.precision import Precision
from clipscale.step.train_step import TrainStep
from clipscale.tools.plan.dry_step import CPU
from clipscale.tools.plan.step_memory import PHASES, StepMemory

# A small vocabulary, so that activations and not the embedding make the peaks.
ARCHITECTURE = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 24, "layers": 3, "width": 64, "head_width": 32, "patch_size": 6},
    "text_cfg": {"context_length": 16, "vocab_size": 1000, "width": 64, "heads": 2, "layers": 2},
}


def measured_step(config: TrainConfig, world: World) -> TrainStep:
    """The trainer's step, around a model with random weights."""
    model = build_model(config.model)
    precision = Precision.set_up(config.precision, world.device)
    precision.cast_frozen_(model.image, model.text)
    with precision.autocast():
        sizes = agreed_chunk_sizes(
            config.cache.sizes,
            model,
            config.batch // world.size,
            world,
            None,
            keeps_graphs=True,
            pairs=pair_encoder(model) if config.trains_captioner else None,
        )
    return build_step(config, world, model, precision, sizes)


def measured_config(batch: int = 64, chunk: int = 16, **changed: Any) -> TrainConfig:
    """A small run. `changed` holds dotted keys, with `__` for the dots."""
    values = {
        "batch": batch,
        "model": {"name": "small", "architecture": deepcopy(ARCHITECTURE)},
        "cache": {"chunk": str(chunk)},
        "precision": "fp32",
    }
    for key, value in changed.items():
        *path, leaf = key.split("__")
        node = values
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return dataclass_from(TrainConfig, values)


def measured(config: TrainConfig, world: World | None = None) -> StepMemory:
    """Memory of the third step of `config` on the CPU, counted from before the model was built, by phases."""
    world = world or World(0, 1, CPU)
    gc.collect()  # garbage of earlier tests must not be freed during the measurement
    gc.freeze()  # for good: a full collection of all modules takes a quarter of a second
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = measured_step(config, world)
        step.cache.keep_bytes = config.cache.keep_bytes or 0
        for _ in range(3):
            one_step(step, config.batch // world.size)
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    memory = StepMemory({}, {})
    for phase in PHASES:
        start, end = max((e.start_ns(), e.end_ns()) for e in events if e.name() == phase)
        memory.before[phase] = memory.peak[phase] = live = sum(change for at, change in changes if at <= start)
        for at, change in changes:
            if start < at <= end:
                live += change
                memory.peak[phase] = max(memory.peak[phase], live)
    return memory


class EqualRows:
    """A `HostBatch` whose pixels and tokens are all 1."""

    def __init__(self, step: TrainStep, count: int) -> None:
        self.count = self.num_texts = count
        self.side = step.model.image_size
        self.context_length = step.model.context_length

    def __len__(self) -> int:
        return self.count

    def pixels(self, start: int, stop: int) -> Tensor:
        return torch.ones(stop - start, 3, self.side, self.side, dtype=torch.uint8)

    def tokens(self, start: int, stop: int) -> Tensor:
        return torch.ones(stop - start, self.context_length, dtype=torch.int32)


def one_step(step: TrainStep, local: int) -> None:
    """A step as in clipscale.train. Garbage is collected before each phase."""
    step.optimizer.zero_grad()
    batch: Any = EqualRows(step, local)
    gc.collect()
    with record_function("encode"):
        features, _ = step.passes.encode(batch, lambda: None)
    gc.collect()
    with record_function("loss"):
        step.cache.backward(step.cache.loss(*features))
        del features
    gc.collect()
    with record_function("replay"):
        step.passes.replay(lambda: None)
    gc.collect()
    with record_function("optim"):
        step.sum_and_unscale_gradients()
        step.update(gradient_norm(step.trainable_parameters))


def measured_on_a_rank(rank: int, world_size: int, changed: dict) -> StepMemory:
    return measured(measured_config(**changed), World(rank, world_size, CPU))
