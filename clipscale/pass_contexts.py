"""Contexts around one pass of an encoder: whether its gradients are summed over ranks, and its buffers kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
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


def _only_no_sync(encoder: Callable[..., Tensor]) -> bool:
    others = ("gradient_sync", "set_requires_gradient_sync")
    return hasattr(encoder, "no_sync") and not any(hasattr(encoder, name) for name in others)


def communicates(encoder: Callable[..., Tensor]) -> bool:
    """Whether each pass exchanges something between ranks: FSDP2's weights, or statistics of batch normalisation."""
    modules = encoder.modules() if isinstance(encoder, nn.Module) else ()
    return any(
        isinstance(module, FSDPModule | nn.SyncBatchNorm) or getattr(module, "synchronised", False)
        for module in modules
    )


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
