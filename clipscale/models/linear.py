"""Linear layers of a step in chunks, under autocast: weights are cast once, their gradients summed in float32.

Autocast by itself casts a float32 weight in every pass of every chunk. A chunk's gradient is a tensor in half
precision, which is then cast and added. That moves 26 bytes for each weight in a chunk's second pass, and 6 in its
first. Here it is 8 and 0: one library product adds to the float32 gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipscale.common.half_precision import CastLayer, HalfWeights, add_half_product


class Replacement:
    """A base of modules with another module's parameters, submodules and settings, and a forward pass of their own.

    It comes first among the bases, because the constructor of the module's own class would make new parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)  # type: ignore[arg-type]
        vars(self).update(vars(module))


class CastLinear(Replacement, CastLayer, nn.Linear):
    """torch's linear layer. In a pass with `half_weights` it computes with these, in their dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.half_weights)

    def weights(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias


def replace_linear_layers(encoder: nn.Module) -> None:
    """Make torch's linear layers in an encoder `CastLinear`."""
    for name, module in list(encoder.named_modules()):
        if type(module) is nn.Linear:
            encoder.set_submodule(name, CastLinear(module))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, half_weights: HalfWeights | None) -> Tensor:
    """x W' + b: (..., inputs) -> (..., outputs). With `half_weights` W and b are those, and so is the dtype."""
    if half_weights is None:
        return F.linear(x, weight, bias)
    # Who adds the weight's gradient to `.grad`:
    #   x requires a gradient   our backward pass, if `half_weights` accumulates. The weight need not be an input then.
    #   it requires none        autograd. It calls our backward pass only if an input requires a gradient: the weight is
    #                           given as one.
    # `.grad` is read here, in the tower's pass. Before the pass DDP may still replace it.
    grad_sink = weight.grad if half_weights.accumulates and x.requires_grad else None
    x = x.to(half_weights.weight.dtype)
    return _Linear.apply(
        x, weight if grad_sink is None else None, bias, half_weights.weight, half_weights.bias, grad_sink
    )


class _Linear(torch.autograd.Function):
    """The product with cast weights, `half` and `half_bias`.

    Its backward pass adds the weight's gradient to `grad_sink`; without one autograd gets it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None,
        half: Tensor, half_bias: Tensor | None, grad_sink: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, half)
        ctx.grad_sink = grad_sink  # not by save_for_backward, since other kept graphs change it in between
        return F.linear(x, half, half_bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, half = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        weight_grad = torch.zeros_like(half, dtype=torch.float32) if needs_weight else ctx.grad_sink
        if weight_grad is not None:
            add = torch.ops.clipscale.add_weight_grad if torch.compiler.is_compiling() else add_weight_grad
            add(weight_grad, rows.t(), x.flatten(0, -2))
        return (
            gradient @ half if needs_x else None,
            weight_grad if needs_weight else None,
            rows.sum(0, dtype=torch.float32) if needs_bias else None,
            *(None, None, None),
        )


def add_weight_grad(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (float32) += a b (half precision). On a CPU the product is rounded before it is added."""
    if a.is_cuda:
        add_half_product(total, a, b)
    else:
        total += a @ b


# The same as an operation of torch: the compiler does not look into it, and knows that it changes `total` in place.
_add_weight_grad = torch.library.custom_op("clipscale::add_weight_grad", add_weight_grad, mutates_args=("total",))
_add_weight_grad.register_fake(lambda total, a, b: None)
