"""Batch normalisation in an encoder: only the first pass updates its statistics."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from clipscale.common.modules import is_batch_norm


def batch_norms(encoder: Callable[..., object]) -> dict[str, nn.Module]:
    """The encoder's batch normalisations in training mode, by name. They mix samples and update running statistics."""
    modules = encoder.named_modules() if isinstance(encoder, nn.Module) else ()
    return {name: module for name, module in modules if is_batch_norm(module) and module.training}


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
