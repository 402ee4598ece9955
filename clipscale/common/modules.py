"""Which modules of a network train, and which are batch normalisations."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch normalisation, of torch or of another package."""
    return isinstance(module, _BatchNorm)
