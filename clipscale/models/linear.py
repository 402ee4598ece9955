"""Linear layers of a step in chunks, under autocast: weights are cast once, their gradients summed in float32.

Autocast by itself casts a float32 weight in every pass of every chunk, and a chunk's gradient is a tensor in half
precision, which is cast and added: 26 bytes of a weight in a chunk's second pass, 6 in its first. Here they are 8 and
0: a library product adds to the float32 gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipscale.common.cast_layer import Cast, CastLayer
from clipscale.models.replacement import Replacement


class CastLinear(Replacement, CastLayer, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.cast)

    def weights(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias


def replace_linear_layers(encoder: nn.Module) -> None:
    """Make torch's linear layers in an encoder `CastLinear`."""
    for name, module in list(encoder.named_modules()):
        if type(module) is nn.Linear:
            encoder.set_submodule(name, CastLinear(module))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, cast: Cast | None) -> Tensor:
    """x W' + b: (..., inputs) -> (..., outputs), in the type of `cast` if that is given."""
    if cast is None:
        return F.linear(x, weight, bias)
    # The backward pass is not called unless something requires a gradient: where nothing else does, the weight must.
    # `.grad` is read here, not before a tower's pass: there DDP may replace it.
    total = weight.grad if cast.adds and x.requires_grad else None
    x = x.to(cast.weight.dtype)
    return _Linear.apply(x, weight if total is None else None, bias, cast.weight, cast.bias, total)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None,
        half: Tensor, half_bias: Tensor | None, total: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, half)
        ctx.total = total  # not saved: graphs that are kept side by side add to it one after the other
        return F.linear(x, half, half_bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, half = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        total = torch.zeros_like(half, dtype=torch.float32) if needs_weight else ctx.total
        if total is not None:
            add = torch.ops.clipscale.add_product if torch.compiler.is_compiling() else add_product
            add(total, rows.t(), x.flatten(0, -2))
        return (
            gradient @ half if needs_x else None,
            total if needs_weight else None,
            rows.sum(0, dtype=torch.float32) if needs_bias else None,
            *(None, None, None),
        )


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (float32) += a b (half precision). On a GPU a chunk's product is not rounded."""
    if a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


# The same for compiled code, which leaves it as it is and does not copy `total`.
_add_product = torch.library.custom_op("clipscale::add_product", add_product, mutates_args=("total",))
_add_product.register_fake(lambda total, a, b: None)
