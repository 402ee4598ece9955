"""Contexts around one pass of an encoder: what its graph takes, whether its gradients are summed over ranks, and its buffers kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def graph_bytes() -> Iterator[Callable[[], int]]:
    """Measures the graph that is built inside: the allocator's bytes on a GPU, else the bytes of its saved tensors."""
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        before = torch.cuda.memory_allocated()
        yield lambda: torch.cuda.memory_allocated() - before
    else:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            yield lambda: sum(saved.values())


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
    """Restores the encoder's buffers afterwards: running statistics are updated by the first pass alone."""
    buffers = list(encoder.buffers()) if isinstance(encoder, nn.Module) else []
    before = [b.clone() for b in buffers]
    yield
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
