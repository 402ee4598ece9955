"""How the gradients of an encoder's chunks are summed over ranks: once a step, by DDP, FSDP2 or the encoder itself."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeGuard

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from clipscale.step.cache.encoder_io import ChunkOutput


def is_ddp(encoder: object) -> TypeGuard[DistributedDataParallel]:
    """Whether the encoder is under DDP."""
    return isinstance(encoder, DistributedDataParallel)


def finds_unused(encoder: object) -> bool:
    """Whether DDP notes in every chunk, by its hooks, which parameters have a gradient."""
    return is_ddp(encoder) and encoder.find_unused_parameters


class GradientSync(Protocol):
    """An encoder that sums its gradients over ranks in its own way, as clipscale's `ShardedTower` does.

    Its forward pass counts as a collective, unless it has an attribute `forward_is_collective = False`.
    """

    def gradient_sync(self, is_last_backward: bool) -> AbstractContextManager[None]:
        """Context of each pass of a chunk. `is_last_backward`: whether the encoder's last backward pass of the step
        runs inside."""


def syncs_itself(encoder: object) -> TypeGuard[GradientSync]:
    """Whether the encoder has a `gradient_sync`, perhaps of the module that it wraps."""
    return hasattr(encoder, "gradient_sync")


class SupportsNoSync(Protocol):
    """A wrapper, such as DDP, whose `no_sync()` is a context in which a pass does not sum gradients over ranks.

    Wrappers other than DDP may decide in the forward pass whether to sum, so the graph of their last chunk is never
    kept.
    """

    def no_sync(self) -> AbstractContextManager[None]: ...


def supports_no_sync(encoder: object) -> TypeGuard[SupportsNoSync]:
    """Whether the encoder has a `no_sync`.

    Hooks on its gradients are then taken to sum them over ranks, except for passes inside `no_sync`, as DDP's do.
    """
    return hasattr(encoder, "no_sync")


def can_sum_after_kept_graph(encoder: object) -> bool:
    """Whether the backward pass of a graph that was built inside `no_sync` can still sum gradients over ranks.

    DDP can be armed again: see `rearm_ddp_sync`. Another wrapper may have decided in its forward pass not to sum.
    """
    return is_ddp(encoder) or syncs_itself(encoder) or not supports_no_sync(encoder)


def is_collective(encoder: Callable[..., object]) -> bool:
    """Whether a forward pass gathers weights, as FSDP2's does, so that all ranks must run equally many passes.

    Synchronised batch normalisation also communicates, but here it counts as false: `short_memory_policy` handles it.
    """
    stated: bool | None = getattr(encoder, "forward_is_collective", None)
    if stated is not None:
        return stated
    # An encoder with a `gradient_sync` of its own is assumed to gather weights.
    return isinstance(encoder, FSDPModule) or syncs_itself(encoder)


@contextmanager
def sync_context(encoder: Callable[..., object], *, is_last_backward: bool) -> Iterator[None]:
    """Context of the pass of a chunk. `is_last_backward`: whether the encoder's last backward pass of the step runs
    inside.

    Who reads it, and when:

    DDP                     in a forward pass (see `rearm_ddp_sync`): if true, the next backward pass sums gradients
    FSDP2's `fully_shard`   in the backward pass, which sums if it is true
    a `gradient_sync`       decides itself. `ShardedTower` sums after every backward pass; if it is true, its weights
                            are then sharded again, in ZeRO's stage 2 too
    """
    if syncs_itself(encoder):
        with encoder.gradient_sync(is_last_backward):
            yield
    elif isinstance(encoder, FSDPModule):
        encoder.set_requires_gradient_sync(is_last_backward)
        try:
            yield
        finally:
            encoder.set_requires_gradient_sync(True)
    elif supports_no_sync(encoder) and not is_last_backward:
        with encoder.no_sync():
            yield
    else:
        yield


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
