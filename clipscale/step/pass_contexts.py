"""Contexts around a pass of an encoder: whether gradients are summed over ranks; its statistics change once a step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel


def batch_norms(encoder: Callable[..., Tensor]) -> dict[str, _BatchNorm]:
    """The encoder's modules of batch normalisation in training mode, by name. They mix samples and keep statistics."""
    modules = encoder.named_modules() if isinstance(encoder, nn.Module) else ()
    return {name: module for name, module in modules if isinstance(module, _BatchNorm) and module.training}


@contextmanager
def gradient_sync(encoder: Callable[..., Tensor], last: bool) -> Iterator[None]:
    """Around a chunk: its gradients are summed over ranks if it is a step's `last` one.

    DDP reads this in the forward pass (see `summing`), FSDP2 in the backward pass. An encoder's own `gradient_sync`
    decides by itself.
    """
    if hasattr(encoder, "gradient_sync"):
        with encoder.gradient_sync(last):
            yield
    elif isinstance(encoder, FSDPModule):
        encoder.set_requires_gradient_sync(last)
        yield
    elif hasattr(encoder, "no_sync") and not last:
        with encoder.no_sync():
            yield
    else:
        yield


def repeatable(encoder: Callable[..., Tensor]) -> bool:
    """Whether a forward pass that failed may be repeated on this rank alone: it gathers no weights, and keeps no
    statistics."""
    gathers = isinstance(encoder, FSDPModule) or hasattr(encoder, "gradient_sync")
    return not gathers and not batch_norms(encoder)


def summing(encoder: Callable[..., Tensor], out: Tensor) -> Tensor:
    """The output of a kept graph, for a backward pass that sums gradients, though its forward pass was under `no_sync`.

    DDP sums in the backward pass after its last forward pass. So `out` passes through the wrapper, while its module is
    the identity.
    """
    if not isinstance(encoder, DistributedDataParallel):
        return out
    module, encoder.module = encoder.module, nn.Identity()
    try:
        return encoder(out)
    finally:
        encoder.module = module


def note_statistics(encoder: Callable[..., Tensor]) -> Callable[[], None]:
    """Notes the statistics of batch normalisation. What it returns restores them."""
    buffers = [buffer for module in batch_norms(encoder).values() for buffer in module.buffers()]
    before = [b.clone() for b in buffers]

    def restore() -> None:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)  # `data` counts no change: the kept graph of another tower may hold the buffer

    return restore


@contextmanager
def unchanged_statistics(encoder: Callable[..., Tensor]) -> Iterator[None]:
    """Restores the statistics afterwards: the first pass alone updates them."""
    restore = note_statistics(encoder)
    try:
        yield
    finally:
        restore()
