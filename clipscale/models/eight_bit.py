"""Linear layers in 8 bits, through torchao: e4m3 or int8, with one scale a row, found anew for every product.

A row of the input is a token, so a token's features do not depend on what else is in its chunk. The gradient of a weight is a product
over the tokens of a chunk, whose rounding depends on the chunk: training in 8 bits is not exact.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, library, nn

from clipscale.common.errors import UserError

MULTIPLE = 16
"""Both sides of a matrix are multiples of it, or the layer stays as it is."""
LEAST = {"fp8": (9, 0), "int8": (8, 0)}
"""Compute capability from which GPUs multiply with a scale for each row."""


def convert(tower: nn.Module, device: torch.device, kind: str = "fp8") -> int:
    """Replace the tower's linear layers in place by those of `fp8` or `int8`, under the same parameters and names; returns how many.

    open_clip's attention multiplies by its weights without calling a layer, so it stays in bf16; its MLPs, two thirds of a block's
    products, are converted. Raises UserError without torchao's kernels, for a GPU that lacks these products, and for a tower with
    nothing to convert.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST[kind]:
        found = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        raise UserError(
            f"precision={kind}: this GPU ({found}) has no such products, sm_{10 * LEAST[kind][0]} and later have; take precision=bf16"
        )
    layers = {
        name: layer
        for name, layer in tower.named_modules()
        if type(layer) is nn.Linear and layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0
    }
    try:
        if kind == "fp8":
            _to_fp8(tower, layers, emulate=device.type == "cpu")  # torch's product there takes minutes
        else:
            _to_int8(layers.values())
    except (ImportError, AttributeError) as error:  # a prototype may move
        raise UserError(
            f"precision={kind} needs torchao ({error}); install clipscale[fp8], or take precision=bf16"
        ) from error
    if not layers:
        raise UserError(f"precision={kind}: a tower has no linear layer of a suitable size; take precision=bf16")
    return len(layers)


def _to_fp8(tower: nn.Module, names: Iterable[str], *, emulate: bool) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate)
    chosen = set(names)
    convert_to_float8_training(tower, config=config, module_filter_fn=lambda _, name: name in chosen)


def _to_int8(layers: Iterable[nn.Linear]) -> None:
    kind = int8_linear()
    for layer in layers:
        layer.__class__ = kind


@cache
def int8_linear() -> type[nn.Linear]:
    """A linear layer whose products, also those of the backward pass, are of torchao's int8 mixed-precision training (a prototype there).

    torchao's own layer takes no part in autocast, and its bias would make a bf16 output float32. Raises ImportError.
    """
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig, int8_mixed_precision

    product: Any = int8_mixed_precision._Int8MixedPrecisionTrainingLinearFunction
    config = Int8MixedPrecisionTrainingConfig()
    if hasattr(torch.ops.torchao, "scaled_int8_mm"):  # where there is a GPU, it has no kernel for CPUs
        library.impl("torchao::scaled_int8_mm", "CPU")(_scaled_product)

    class Int8Linear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            device = x.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
            y: Tensor = product.apply(x.to(dtype).contiguous(), self.weight, None, config)
            if y.requires_grad:
                y.register_hook(Tensor.contiguous)  # its backward pass takes views of the gradient
            return y if self.bias is None else y + self.bias.to(dtype)

    return Int8Linear


def _scaled_product(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return torch._int_mm(a, b) * columns.view(-1) * rows.view(-1, 1)
