"""The type in which a tower's weights are used, sharded or not: the one to which autocast would cast them."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

# Whether FSDP2 of this torch (2.15 or later) gathers each parameter in a type of its own.
PER_PARAMETER = "param_dtype_override_fn" in signature(MixedPrecisionPolicy).parameters
# Autocast rounds the weights of these layers.
AUTOCAST_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)


def type_under_autocast(tower: nn.Module, dtype: torch.dtype) -> Callable[[nn.Parameter], torch.dtype]:
    """A function from a weight to the type in which autocast to `dtype` uses it."""
    layers = [module for module in tower.modules() if isinstance(module, AUTOCAST_LAYERS)]
    cast = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
    cast -= {id(module.weight) for module in tower.modules() if isinstance(module, nn.Embedding)}  # tied weights
    return lambda p: dtype if id(p) in cast else p.dtype


def cast_product_weights_(tower: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights of a tower's matrix products in place to `dtype`, as autocast would in each pass."""
    pin_cast_dtype(tower)
    type_of = type_under_autocast(tower, dtype)
    for p in tower.parameters():
        p.data = p.data.to(type_of(p))


def pin_cast_dtype(tower: nn.Module) -> None:
    """Fix the type that open_clip's transformers cast their inputs to: they read it from a weight of the first block.

    If that weight is sharded, it is float32 before the first chunk and in half precision after it, so the type would
    change.
    """
    module: Any
    for module in tower.modules():
        if hasattr(module, "get_cast_dtype"):
            dtype = module.get_cast_dtype()
            module.get_cast_dtype = lambda dtype=dtype: dtype
