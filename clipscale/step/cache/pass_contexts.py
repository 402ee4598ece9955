"""How encoders differ: when they sum gradients over ranks, and whether a pass of theirs changes statistics."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeGuard

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from clipscale.common.modules import is_batch_norm
from clipscale.step.cache.chunk_output import ChunkOutput
from clipscale.step.cache.kept_graphs import OnShortMemory


def is_ddp(encoder: object) -> TypeGuard[DistributedDataParallel]:
    """Whether the encoder is under DDP."""
    return isinstance(encoder, DistributedDataParallel)


def has_no_sync(encoder: object) -> bool:
    """Whether hooks sum the encoder's gradients in each backward pass, but not inside its `no_sync`: DDP's, or those of
    another wrapper with that method."""
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
    `gradient_sync`         of a user's encoder decides itself; see `GradCache`
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
    elif has_no_sync(encoder) and not sums_gradients:
        with encoder.no_sync():  # type: ignore[attr-defined]
            yield
    else:
        yield


def is_collective(encoder: Callable[..., object]) -> bool:
    """Whether the forward pass communicates (FSDP2 gathers weights), so that every rank must run equally many."""
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
            buffer.data.copy_(value)  # `data`: a change that autograd does not see, as another tower's kept graph needs

    return restore


@contextmanager
def batch_norm_preserved(encoder: Callable[..., object]) -> Iterator[None]:
    """Restores the statistics afterwards: only the first pass updates them."""
    restore = snapshot_batch_norm(encoder)
    try:
        yield
    finally:
        restore()
