"""A tower under FSDP2: how it is sharded, and when its weights are gathered and sharded again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from clipscale.common.modules import nested_blocks
from clipscale.distributed.weight_types import PER_PARAMETER, pin_cast_dtype, type_under_autocast

# The stage of ZeRO, by the value of `launch.parallel`.
ZERO_STAGES = {"zero2": 2, "zero3": 3}


class ShardedTower(nn.Module):
    """A sharded tower. Gradients are summed, not averaged: each rank has a share of the loss's gradient.

    Between steps weights, gradients and optimizer state are sharded. Within a step it depends on ZeRO's stage
    (Rajbhandari et al. 2020, arXiv 1910.02054):

    - Stage 3 gathers a block's weights again for each chunk.
    - Stage 2 keeps weights gathered from the first chunk to the last.

    Both sum gradients into shards after each chunk.

    `shard_tower` makes it.
    """

    def __init__(self, module: nn.Module, zero_stage: int) -> None:
        super().__init__()
        self.module = module
        self.zero_stage = zero_stage

    def forward(self, *inputs: object, **named: object) -> object:
        return self.module(*inputs, **named)

    @contextmanager
    def gradient_sync(self, is_last_backward: bool) -> Iterator[None]:
        """Context of a chunk's pass, for `GradCache`: decides whether its backward pass shards the weights again.

        In ZeRO's stage 3 every chunk's backward pass does, in stage 2 only the step's last one. In both stages every
        backward pass sums gradients.
        """
        assert isinstance(self.module, FSDPModule)
        self.module.set_reshard_after_backward(is_last_backward or self.zero_stage == 3)
        yield


def shard_tower(tower: nn.Module, mesh: DeviceMesh, zero_stage: int, dtype: torch.dtype) -> ShardedTower:
    """Shard a tower in place. `dtype`: see `mixed_precision_policy`."""
    pin_cast_dtype(tower)
    precision_policy = mixed_precision_policy(tower, dtype)
    for module in [*nested_blocks(tower), tower]:
        fully_shard(module, mesh=mesh, mp_policy=precision_policy)
    for sharded_module in fsdp_modules(tower):
        sharded_module.set_gradient_divide_factor(1.0)
        sharded_module.set_force_sum_reduction_for_comms(True)
        # Embeddings and projections, outside the blocks, stay gathered until the backward pass.
        sharded_module.set_reshard_after_forward(zero_stage == 3 and sharded_module is not tower, recurse=False)
    return ShardedTower(tower, zero_stage)


def sharded_as(parameter: Tensor, value: Tensor) -> Tensor:
    """A whole tensor, sharded as the parameter is."""
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, or any other tensor itself. Writing to it writes to the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def mixed_precision_policy(tower: nn.Module, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Gathers the weights of matrix products in autocast's `dtype`, to which autocast would round them anyway.

    Before torch 2.15 all weights are gathered in their own type. Other weights keep their type, and the layers' inputs
    and outputs the types that autocast gives them. Gradients are summed in float32.
    """
    if dtype == torch.float32 or not PER_PARAMETER:
        return MixedPrecisionPolicy()
    options: dict[str, Any] = {"param_dtype_override_fn": type_under_autocast(tower, dtype)}
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False, **options)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules that FSDP2 shards, one by one."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free the gathered weights, after an interrupted pass or a change of the shards."""
    for module in fsdp_modules(model):
        module.reshard()


def replicate_state(optimizer: torch.optim.Optimizer) -> None:
    """Turn whole tensors in the state of sharded parameters into replicated DTensors, as operations with shards need.

    Adafactor's rows and columns are such tensors.
    """
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(p, DTensor) and isinstance(value, Tensor) and value.ndim and not isinstance(value, DTensor):
                state[key] = DTensor.from_local(value, p.device_mesh, [Replicate()], run_check=False)
