"""The memory of a rank beside a step's passes: weights, gradients, optimizer state, gathered and cast weights.

All sizes in bytes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from clipscale.common.modules import is_trainable, nested_blocks
from clipscale.distributed.parallel import gradient_norm
from clipscale.distributed.weight_types import PER_PARAMETER, cast_product_weights_, type_under_autocast
from clipscale.step.cache.cast_weights import layers_to_cast
from clipscale.step.precision import Precision
from clipscale.step.train_step import TrainStep
from clipscale.tools.plan.memory_tracker import MemoryTracker, allocated_bytes


@dataclass(frozen=True)
class GatheredWeights:
    """Weights of a tower that FSDP2 has gathered, in the type in which it gathers them."""

    # Bytes that are held from the first chunk to the last.
    held: int = 0
    # Further bytes in the first pass.
    encode: int = 0
    # Further bytes in the second pass, gradients that are not yet summed included.
    replay: int = 0

    @classmethod
    def of_towers(cls, towers: Sequence[nn.Module], parallel: str, dtype: torch.dtype) -> "GatheredWeights":
        """Compute the bytes of the modules that are sharded one by one.

        In stage 3 a block's weights are gathered while the block before it computes.
        """
        everything = rest = block = 0
        for tower in towers:
            type_of = type_under_autocast(tower, dtype)
            sizes = {p: p.numel() * type_of(p).itemsize for p in tower.parameters()}
            everything += sum(sizes.values())
            for module in nested_blocks(tower):
                block = max(block, sum(sizes.pop(p, 0) for p in module.parameters()))
            rest += sum(sizes.values())
        if parallel == "zero2":
            return cls(everything, 0, 2 * block)
        return cls(rest, 2 * block, 4 * block)


@dataclass(frozen=True)
class StateMemory:
    """The memory of a rank beside a step's passes. Lists have an entry for each tower."""

    # Bytes between steps.
    state: int
    # Peak of an update beyond what is live before it.
    update: int
    # Bytes of gradients while a tower's chunks add to them.
    gradients: list[int]
    # Bytes of gradients after a tower's last chunk. Under DDP 0: they are views of the buckets.
    summed_gradients: list[int]
    # Bytes of gradients during a tower's replay if it has a single chunk, beyond those that the pass itself makes.
    single_chunk_gradients: list[int]
    # Bytes of the weights that a step of several chunks casts once.
    cast_weights: list[int]
    gathered: list[GatheredWeights]


def one_of_each(optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, int]]:
    """The parameters that a dry update includes. Each comes with the number of others like it, which are left out.

    An optimizer that updates parameters of one shape one by one, or in a fused kernel, takes no more memory for them
    than for one.
    """
    alike: dict[object, list[nn.Parameter]] = {}
    for number, group in enumerate(optimizer.param_groups):
        at_once = group.get("foreach") and not group.get("fused")
        for p in group["params"]:
            alike.setdefault(id(p) if at_once else (number, p.shape, p.dtype), []).append(p)
    return [(same[0], len(same) - 1) for same in alike.values()]


def update_memory(step: TrainStep, tracker: MemoryTracker) -> tuple[int, int]:
    """The peak of an update beyond what is live before it, and the bytes of state of the parameters that are left out.

    The peak is measured in a second update: the first one makes the optimizer's state.
    """
    updated = one_of_each(step.optimizer)
    for _ in range(2):  # the first update makes the state
        step.optimizer.zero_grad()
        for p, _ in updated:
            p.grad = torch.empty_like(p)
        tracker.take_peak()
        step.sum_and_unscale_gradients()
        step.update(gradient_norm(step.trainable_parameters))
    peak = tracker.take_peak() - tracker.live
    step.optimizer.zero_grad()
    state = step.optimizer.state
    omitted = sum(
        others * allocated_bytes(x.untyped_storage().nbytes())
        for p, others in updated
        for x in state[p].values()
        if isinstance(x, Tensor)
    )
    return peak, omitted


def state_memory(step: TrainStep, towers: Sequence[nn.Module], tracker: MemoryTracker, before: int) -> StateMemory:
    """The memory of a rank without other ranks. Makes the optimizer's state.

    `before`: live bytes before the step was built.
    """
    update, omitted = update_memory(step, tracker)
    gradients = [sum(p.nbytes for p in tower.parameters() if p.requires_grad) for tower in towers]
    return StateMemory(
        state=tracker.live - before + omitted,
        update=update,
        gradients=gradients,
        summed_gradients=gradients,
        single_chunk_gradients=[0, 0],
        cast_weights=[cast_bytes(tower, step.precision) for tower in towers],
        gathered=[GatheredWeights(), GatheredWeights()],
    )


def cast_bytes(tower: nn.Module, precision: Precision) -> int:
    """Bytes of the weights that a step of several chunks casts once."""
    layers = layers_to_cast(tower, precision.autocast)
    return sum(dtype.itemsize * x.numel() for layer, dtype in layers for x in layer.weights() if x is not None)


def divided_among_ranks(
    memory: StateMemory,
    model: nn.Module,
    towers: Sequence[Sequence[nn.Module]],
    dtype: torch.dtype,
    world_size: int,
    parallel: str,
) -> StateMemory:
    """Divide state and gradients among ranks. Casts weights that FSDP2 gathers to the types in which it gathers them.

    DDP's buckets are as large as all gradients, and summed gradients are views of them. `dtype`: autocast's type.
    `towers`: the modules of each tower's passes that `parallel.wrap` gets. It shards those that train; each rank has
    the others whole, and what lies outside of all.
    """
    if parallel == "ddp":
        return replace(memory, state=memory.state + sum(memory.gradients), summed_gradients=[0, 0])
    gathered_dtype = dtype if PER_PARAMETER else torch.float32
    sharded = [[module for module in modules if is_trainable(module)] for modules in towers]
    divided = {p for modules in sharded for module in modules for p in module.parameters()}
    undivided = sum(p.nbytes for p in model.parameters() if p not in divided)
    gathered = [GatheredWeights.of_towers(modules, parallel, gathered_dtype) for modules in sharded]
    for module in itertools.chain.from_iterable(sharded):
        cast_product_weights_(module, gathered_dtype)
    share = [size // world_size for size in memory.gradients]
    return StateMemory(
        state=undivided + (memory.state - undivided) // world_size,
        update=memory.update // world_size,
        gradients=share,
        summed_gradients=share,
        single_chunk_gradients=share,
        cast_weights=[0, 0],
        gathered=gathered,
    )
