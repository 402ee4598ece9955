"""Towers under DDP or FSDP2, and their gradients over ranks: sums and the norm."""

from collections.abc import Iterable
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from clipscale.common.modules import is_trainable
from clipscale.distributed.fsdp import ZERO_STAGES, shard_tower
from clipscale.distributed.world import World

# DDP's switch to broadcast buffers in every forward pass, which torch has renamed. The towers' buffers need none: they
# are constants, or running statistics of synchronised batch normalisation, which are equal on all ranks.
_BROADCASTS_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)


def wrap(world: World, tower: nn.Module, parallel: str, dtype: torch.dtype) -> nn.Module:
    """The tower under DDP or FSDP2. Gradients are SUMMED, not averaged: each rank has a share of the gradient.

    A frozen tower is returned as it is. Batch normalisation is synchronised on GPUs; torch cannot on CPUs. FSDP2
    (`zero2`, `zero3`) changes the module in place; `dtype`: see shard_tower.
    """
    if world.size == 1 or not is_trainable(tower):
        return tower
    if world.device.type == "cuda":
        tower = convert_sync_batchnorm(tower)
    if parallel in ZERO_STAGES:
        return shard_tower(tower, world.mesh(), ZERO_STAGES[parallel], dtype)
    ids = [world.device.index] if world.device.type == "cuda" else None
    constant_buffers: dict[str, Any] = {_BROADCASTS_BUFFERS: False}
    wrapped = DistributedDataParallel(tower, device_ids=ids, gradient_as_bucket_view=True, **constant_buffers)
    wrapped.register_comm_hook(None, _sum)
    return wrapped


def _sum(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's hook for a bucket of gradients: sums it over ranks."""
    reduced = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return reduced.then(lambda future: future.value()[0])


def sum_gradients(world: World, parameters: Iterable[nn.Parameter | None]) -> None:
    """Sum over ranks the gradients of parameters outside DDP and FSDP2."""
    for p in parameters:
        if p is not None and p.grad is not None:
            world.all_reduce_sum_(p.grad)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Global Euclidean norm of all gradients, sharded or not: 0-d, the same on every rank, 0 without gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = []
    for sharded in (True, False):
        group = [g for g in gradients if isinstance(g, DTensor) == sharded]
        if group:
            norm = torch.nn.utils.get_total_norm(group)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return torch.stack(norms).norm() if norms else torch.zeros(())
