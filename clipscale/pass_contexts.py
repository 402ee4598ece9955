"""Contexts around one pass of an encoder: whether its gradients are summed over ranks, and its buffers kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def gradient_sync(encoder: Callable[..., Tensor], enabled: bool) -> Iterator[None]:
    """Turns the sum of gradients over ranks on or off. DDP reads this in the forward pass, FSDP2 in the backward pass.

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
            if buffer._version != version or isinstance(module, _BatchNorm):  # its kernel does not count what it writes
                buffer.copy_(value)
