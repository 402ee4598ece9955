"""Which modules of a network train, and which are batch normalisations."""

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def trains(encoder: Callable[..., object]) -> bool:
    """Whether an encoder has parameters that train. One that is not a module is assumed to."""
    return not isinstance(encoder, nn.Module) or any(p.requires_grad for p in encoder.parameters())


def is_frozen(module: nn.Module) -> bool:
    """Whether a module has parameters, and none of them trains. Without parameters it neither trains nor is frozen."""
    return not trains(module) and any(True for _ in module.parameters())


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch normalisation, of torch or of another package."""
    return isinstance(module, _BatchNorm)
