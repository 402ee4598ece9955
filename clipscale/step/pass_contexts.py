"""Contexts around one pass of an encoder: whether its gradients are summed over ranks, and its buffers kept."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def gradient_sync(encoder: Callable[..., Tensor], enabled: bool) -> Iterator[None]:
    """Turns the sum of gradients over ranks on or off. DDP reads this in the forward pass (`expecting`), FSDP2 in the backward pass.

    An encoder's own `gradient_sync` decides by itself what it does in the last chunk (`enabled`) and in others.
    """
    if hasattr(encoder, "gradient_sync"):
        with encoder.gradient_sync(enabled):
            yield
    elif hasattr(encoder, "set_requires_gradient_sync"):
        encoder.set_requires_gradient_sync(enabled)
        yield
    elif hasattr(encoder, "no_sync") and not enabled:
        with encoder.no_sync():
            yield
    else:
        yield


def expects(encoder: Callable[..., Tensor]) -> bool:
    """Whether the backward pass of a graph that was made without a sum can sum gradients. Of wrappers with `no_sync` DDP alone can."""
    return not _only_no_sync(encoder) or type(encoder) is DistributedDataParallel


def expecting(encoder: Callable[..., Tensor], out: Tensor) -> Tensor:
    """`out`, for a backward pass that sums gradients over ranks, though its forward pass was under `no_sync`.

    DDP sums in the backward pass after its last forward pass. So `out` passes through the wrapper, while its module is the identity.
    """
    if not _only_no_sync(encoder):
        return out
    modules = vars(encoder)["_modules"]
    module, modules["module"] = modules["module"], nn.Identity()
    try:
        return encoder(out)
    finally:
        modules["module"] = module


def rebuild_buckets(encoder: Callable[..., Tensor]) -> None:
    """Lets DDP rebuild its buckets here, on all ranks alike, instead of in the first chunk with gradients, which ranks choose by memory.

    It does so once, by collectives, in the first forward pass with gradients after its first sum.
    """
    if type(encoder) is DistributedDataParallel and torch.is_grad_enabled():
        with encoder.no_sync():
            expecting(encoder, torch.empty(0))


def _only_no_sync(encoder: Callable[..., Tensor]) -> bool:
    others = ("gradient_sync", "set_requires_gradient_sync")
    return hasattr(encoder, "no_sync") and not any(hasattr(encoder, name) for name in others)


def groups_of(encoders: Sequence[Callable[..., Tensor]]) -> list[dist.ProcessGroup | None]:
    """The groups of ranks that exchange something in each pass: shards of weights or of layers, or statistics of batch normalisation.

    None stands for all ranks, where there is no process group yet.
    """
    found: list[dist.ProcessGroup | None] = []
    for module in modules_of(encoders):
        if isinstance(module, nn.SyncBatchNorm) or getattr(module, "synchronised", False):
            found.append(module.process_group or dist.group.WORLD)  # type: ignore[arg-type]
        if isinstance(module, FSDPModule):
            module.reshard()  # gathered weights do not name their group
        for p in module.parameters(recurse=False):
            found.extend(p.device_mesh.get_all_groups() if isinstance(p, DTensor) else ())
    return list(dict.fromkeys(found))  # in the same order on all ranks


def modules_of(encoders: Sequence[Callable[..., Tensor]]) -> Iterator[nn.Module]:
    """All modules of the encoders that are modules."""
    return (module for encoder in encoders if isinstance(encoder, nn.Module) for module in encoder.modules())


def highest_of(groups: Sequence[dist.ProcessGroup | None], device: torch.device | None, *values: int) -> list[int]:
    """The largest of the values of every rank of these groups, one by one."""
    found = torch.tensor(values, device=device)
    for group in groups:
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return [int(value) for value in found.tolist()]


@contextmanager
def unchanged_buffers(encoder: Callable[..., Tensor]) -> Iterator[None]:
    """Restores the encoder's buffers afterwards: running statistics are updated by the first pass alone.

    Buffers that nothing has changed are not written, since graphs of other towers may hold them.
    """
    modules = list(encoder.modules()) if isinstance(encoder, nn.Module) else []
    before = [(module, b, b.clone(), b._version) for module in modules for b in module.buffers(recurse=False)]
    yield
    with torch.no_grad():
        for module, buffer, value, version in before:
            if isinstance(module, _BatchNorm):
                # Its kernel counts no version when it writes. Nor does this: a kept graph of another tower may hold the buffer, whose
                # values its backward pass does not read in training mode.
                if module.training:
                    buffer.data.copy_(value)
            elif buffer._version != version:
                buffer.copy_(value)
