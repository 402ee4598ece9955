"""What a network's modules are: trained or frozen, batch normalisations, repeated blocks."""

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def is_trainable(encoder: Callable[..., object]) -> bool:
    """Whether an encoder has parameters that train. A function that is not a module is assumed to train."""
    return not isinstance(encoder, nn.Module) or any(p.requires_grad for p in encoder.parameters())


def is_frozen(module: nn.Module) -> bool:
    """Whether a module has parameters, and none of them trains. Without parameters it neither trains nor is frozen."""
    return not is_trainable(module) and any(True for _ in module.parameters())


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch normalisation, of torch or of another package."""
    return isinstance(module, _BatchNorm)


def nested_blocks(tower: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformer or convolutional network, and its stages. FSDP2 gathers one at a time.

    Inner blocks come first: `fully_shard` takes those parameters of a module that no earlier call has taken.
    """
    found: list[nn.Module] = []
    for module in reversed(list(tower.modules())):
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            is_repeated = len({type(child) for child in module}) == 1
            if is_repeated:
                found += [child for child in module if list(child.parameters())]
    return found
