"""Contexts around a pass of an encoder, and what they ask of it: DDP or FSDP2, batch normalisation."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeGuard

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from clipscale.common.modules import is_batch_norm
from clipscale.step.cache.chunk_output import ChunkOutput
from clipscale.step.cache.kept_graphs import OnShortMemory


def is_ddp(encoder: object) -> TypeGuard[DistributedDataParallel]:
    """Whether the encoder is under DDP."""
    return isinstance(encoder, DistributedDataParallel)


class HasNoSync(Protocol):
    """A wrapper with a context in which a pass does not sum gradients, such as DDP."""

    def no_sync(self) -> AbstractContextManager[None]: ...


def sums_by_hooks(encoder: object) -> TypeGuard[HasNoSync]:
    """Whether hooks on the encoder's gradients sum them over ranks, except for passes inside its `no_sync`.

    True of DDP, and taken to be true of any other wrapper with that method.
    """
    return hasattr(encoder, "no_sync")


def batch_norms(encoder: Callable[..., object]) -> dict[str, nn.Module]:
    """The encoder's batch normalisations in training mode, by name. They mix samples and update running statistics."""
    modules = encoder.named_modules() if isinstance(encoder, nn.Module) else ()
    return {name: module for name, module in modules if is_batch_norm(module) and module.training}


@contextmanager
def chunk_context(encoder: Callable[..., object], *, sums_gradients: bool) -> Iterator[None]:
    """Around the pass of a chunk. `sums_gradients`: whether its backward pass sums gradients over the ranks.

    `sums_gradients` is true for an encoder's last backward pass in a step. Who reads it, and when:

    DDP                     in the forward pass (see `rearm_ddp_sync`): the next backward pass sums
    FSDP2's `fully_shard`   in the backward pass, which sums
    `ShardedTower`          in the backward pass, which always sums: in ZeRO's stage 2 it then shards the weights again
    a `gradient_sync`       of a user's encoder decides itself; see `GradCache`
    """
    if hasattr(encoder, "chunk_context"):
        with encoder.chunk_context(sums_gradients=sums_gradients):
            yield
    elif hasattr(encoder, "gradient_sync"):
        with encoder.gradient_sync(sums_gradients):
            yield
    elif isinstance(encoder, FSDPModule):
        encoder.set_requires_gradient_sync(sums_gradients)
        try:
            yield
        finally:
            encoder.set_requires_gradient_sync(True)
    elif sums_by_hooks(encoder) and not sums_gradients:
        with encoder.no_sync():
            yield
    else:
        yield


def is_collective(encoder: Callable[..., object]) -> bool:
    """Whether a forward pass communicates (FSDP2 gathers weights), so that all ranks must run equally many passes."""
    stated: bool | None = getattr(encoder, "forward_is_collective", None)
    if stated is not None:
        return stated
    # A user's encoder with a `gradient_sync` of its own is assumed to gather weights.
    return isinstance(encoder, FSDPModule) or hasattr(encoder, "gradient_sync")


def on_short_memory(encoder: Callable[..., object]) -> OnShortMemory:
    """What the encoder's first pass does where the memory is short for a graph."""
    if is_collective(encoder):
        return OnShortMemory.ASK_FIRST
    return OnShortMemory.RAISE if batch_norms(encoder) else OnShortMemory.RETRY


def rearm_ddp_sync(encoder: Callable[..., object], out: ChunkOutput) -> ChunkOutput:
    """Re-arm DDP for an `out` computed under `no_sync`: a backward pass from the returned output sums gradients.

    DDP decides in a forward pass whether the next backward pass sums. So `out` passes through DDP again, with the
    identity in the place of the wrapped module.
    """
    if not is_ddp(encoder):
        return out
    module = encoder.module
    encoder.module = nn.Identity()
    try:
        return encoder(out)
    finally:
        encoder.module = module


def snapshot_batch_norm(encoder: Callable[..., object]) -> Callable[[], None]:
    """Copy the present statistics of batch normalisation. Returns a function that restores them."""
    buffers = [buffer for module in batch_norms(encoder).values() for buffer in module.buffers()]
    before = [b.clone() for b in buffers]

    def restore() -> None:
        for buffer, value in zip(buffers, before, strict=True):
            # By `data`, so that autograd does not see the change: another tower's kept graph may hold the buffer.
            buffer.data.copy_(value)

    return restore


@contextmanager
def batch_norm_preserved(encoder: Callable[..., object]) -> Iterator[None]:
    """Restores the statistics afterwards: only the first pass updates them."""
    restore = snapshot_batch_norm(encoder)
    try:
        yield
    finally:
        restore()
