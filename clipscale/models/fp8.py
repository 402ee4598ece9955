"""Linear layers in 8-bit floating point, through torchao: e4m3 with one scale a row, found anew for every product.

A row of the input is a token, so a token's features do not depend on what else is in its chunk. The gradient of a weight is a product
over the tokens of a chunk, whose rounding depends on the chunk: training in fp8 is not exact.
"""

from dataclasses import replace

import torch
from torch import nn

from clipscale.errors import UserError

MULTIPLE = 16
"""Both sides of a matrix are multiples of it, or the layer stays as it is."""
LEAST = (9, 0)
"""Compute capability from which GPUs multiply with a scale for each row."""


def convert(tower: nn.Module, device: torch.device) -> int:
    """Replace the tower's linear layers in place, under the same parameters and names; returns how many.

    open_clip's attention multiplies by its weights without calling a layer, so it stays in bf16; its MLPs, two thirds of a block's
    products, become fp8. Raises UserError without torchao, for a GPU that lacks these products, and for a tower with nothing to convert.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST:
        found = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        raise UserError(
            f"precision=fp8: this GPU ({found}) has no such products, an H100 or newer has; take precision=bf16"
        )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UserError("precision=fp8 needs torchao; install clipscale[fp8], or take precision=bf16") from error
    suitable = [
        name
        for name, layer in tower.named_modules()
        if type(layer) is nn.Linear and layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0
    ]
    if not suitable:
        raise UserError("precision=fp8: a tower has no linear layer of a suitable size; take precision=bf16")
    config = replace(
        Float8LinearConfig.from_recipe_name("rowwise"), emulate=device.type == "cpu"
    )  # torch's product there takes minutes
    convert_to_float8_training(tower, config=config, module_filter_fn=lambda _, name: name in suitable)
    return len(suitable)
