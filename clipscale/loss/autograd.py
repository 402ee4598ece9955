"""The loss as one differentiable function: each pass is an exchange's sweep over one of a backend's two functions.

Letters: n rows (images) and m columns (texts) of this rank, N rows of all ranks, D feature width.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipscale.common.rng import RandomState
from clipscale.loss.block import Block, FeatureBlock, Parameters, sum_dtype, widened
from clipscale.loss.exchange import GRAD, LOG_SUM_EXP, Exchange, Visit
from clipscale.loss.inputs import Inputs
from clipscale.loss.objective import Objective
from clipscale.loss.runtime import float32_matmuls
from clipscale.loss.similarity import Similarity, row_products

INPUTS = ("image_features", "text_features", "logit_scale", "logit_bias")
STRIPE = 2**16  # rows whose gradients one process sums at a time: some panels of the Triton backend


class Backend(Protocol):
    """What a backend computes of a block; see TorchBackend."""

    def forward(self, block: Block) -> None: ...

    def backward(self, block: Block) -> None: ...


@dataclass
class LossCall:
    """One call of the loss: everything but its differentiable tensors."""

    exchange: Exchange
    backend: Backend
    similarity: Similarity
    objective: Objective
    inputs: Inputs  # except for the features, which autograd passes
    check: bool  # refuse a result that is not finite, which waits for the device
    needs_backward: bool  # whether a backward pass may follow

    def local_blocks(self, image_features: Tensor, text_features: Tensor) -> tuple[FeatureBlock, FeatureBlock]:
        """This rank's rows and columns, with their weights."""
        inputs = self.inputs
        sides = []
        both_sides = (image_features, inputs.rows, 1), (text_features, inputs.cols, inputs.captions.count)
        for (x, side, count), weight in zip(both_sides, self.objective.weights):
            side = replace(side, features=x.detach().to(inputs.dtype).contiguous())
            if weight is not None:
                side.weight = side.features.new_full((len(side),), weight / count, dtype=sum_dtype(inputs.dtype))
                side.weight[len(image_features) * count :] = 0  # a hard negative is the positive of no image
            sides.append(side)
        return sides[0], sides[1]


class ContrastiveLoss(torch.autograd.Function):
    """(call, images, texts, scale, bias, *the similarity's parameters) -> the mean over all ranks' rows.

    A softmax takes one matmul unit in the forward pass, which keeps the log-sum-exps, and three in the backward pass. A
    pairwise objective takes three in all: one sweep in the forward pass computes its value and its gradients. A second
    backward pass through the same graph takes three more. Frozen inputs save units. Gradients are local: their sum over
    the ranks is the gradient of the mean.
    """

    @staticmethod
    def forward(ctx: Any, call: LossCall, *inputs: Tensor) -> Tensor:
        images, texts, scale, bias, *_ = inputs
        ctx.call = call
        ctx.grads = None
        ctx.count = len(images) * call.exchange.size
        ctx.random = None if call.similarity.homogeneous else RandomState.now(images.device)
        with _arithmetic(call, images.device):
            rows, cols = call.local_blocks(images, texts)
            rows.target = scale.new_zeros(len(rows), dtype=torch.float64)
            if not call.objective.pairwise:
                forward_sweep(call, rows, cols, Parameters(scale, bias))
            else:
                needed = [call.needs_backward and needs for needs in ctx.needs_input_grad[1:]]
                grads = gradients(call, rows, cols, inputs, needed, scale.new_tensor(1 / ctx.count))
                ctx.grads = grads if any(needed) else None
            total = call.exchange.total(local_value(rows, cols))

        if call.check and not math.isfinite(total):
            raise ValueError(_reason(float(total), inputs))
        rows.target = None
        row_tensors = rows.present()
        col_tensors = cols.present()
        ctx.names = list(row_tensors), list(col_tensors)
        ctx.save_for_backward(*inputs, *row_tensors.values(), *col_tensors.values())
        return (total / ctx.count).to(scale.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        needed = ctx.needs_input_grad[1:]
        saved = ctx.saved_tensors
        inputs = saved[: len(needed)]
        sides = saved[len(needed) :]
        grads = ctx.grads
        ctx.grads = None
        if grads is not None:
            grads = [None if x is None else x.mul_(grad_output) for x in grads]
        else:
            row_names, col_names = ctx.names
            rows = FeatureBlock(**dict(zip(row_names, sides)))
            cols = FeatureBlock(**dict(zip(col_names, sides[len(row_names) :])))
            with _arithmetic(call, inputs[0].device), _replayed(ctx.random):
                grads = gradients(call, rows, cols, inputs, needed, grad_output / ctx.count)
        return None, *(None if x is None else x.to(like.dtype) for x, like in zip(grads, inputs))


def forward_sweep(call: LossCall, rows: FeatureBlock, cols: FeatureBlock, parameters: Parameters) -> None:
    """One sweep of the backend's forward function: the log-sum-exps of rows and columns, and the rows' targets."""
    if rows.weight is not None:
        rows.lse = rows.empty_lse()

    def visit(cols: FeatureBlock, positive: int | None) -> None:
        call.backend.forward(Block(rows, cols, parameters, positive, call.inputs.captions))

    sums = [] if cols.weight is None else [LOG_SUM_EXP]
    for lse in call.exchange.sweep(cols, sums, visit):
        cols.lse = lse


def local_value(rows: FeatureBlock, cols: FeatureBlock) -> Tensor:
    """This rank's part of the sum of weighted log-sum-exps less targets, 0-d."""
    assert rows.target is not None
    value = -rows.target.sum()
    for side in (rows, cols):
        if side.lse is not None and side.weight is not None:
            value += (side.weight * side.lse).sum()
    return value


def gradients(
    call: LossCall,
    rows: FeatureBlock,
    cols: FeatureBlock,
    inputs: Sequence[Tensor],
    needed: Sequence[bool],
    factor: Tensor,
) -> list[Tensor | None]:
    """One sweep of the backend's backward function: the gradients of the inputs that need one, times `factor`.

    Gradients of features have the features' type. If the forward pass computes gradients of float16 features, they are
    float32: the backward pass scales them later, which float16 could not hold.
    """
    images, texts, *numbers = inputs
    needs_images, needs_texts, needs_scale, *_ = needed
    parameters = parameters_with_sums(numbers, needed[2:])
    image_grad = None
    # One process computes the image gradient stripe by stripe, so only the text gradient is a whole float32 tensor. Not
    # for a module: its random numbers depend on the order of tiles.
    one_process = call.exchange.size == 1 and call.similarity.homogeneous
    if one_process and needs_images and needs_texts and len(rows) > STRIPE:
        image_grad = torch.empty_like(images, dtype=_gradient_dtype(call, images))
        visit = striped(call, rows, parameters, image_grad, factor)
    else:
        if needs_images or (needs_scale and not needs_texts):
            rows.grad = rows.empty_grad()
        visit = undivided(call, rows, parameters)
    sums = call.exchange.sweep(cols, [GRAD] if needs_texts else [], visit)
    for total in (parameters.scale_grad, parameters.bias_grad, *parameters.module_grads):
        if total is not None:
            total.mul_(factor)
    if rows.grad is not None:
        row_grad = finished(rows, rows.grad, parameters, factor, _gradient_dtype(call, images))
        image_grad = row_grad if needs_images else None
        rows.grad = None  # before the texts' gradient is made
    text_grad = finished(cols, sums.pop(), parameters, factor, _gradient_dtype(call, texts)) if sums else None
    return [image_grad, text_grad, parameters.scale_grad, parameters.bias_grad, *parameters.module_grads]


def parameters_with_sums(numbers: Sequence[Tensor], needed: Sequence[bool]) -> Parameters:
    """The scale, the bias and a module's parameters, with zeros for the gradients of those that need one."""
    scale, bias, *module = numbers
    needs_scale, needs_bias, *needs_module = needed
    return Parameters(
        scale,
        bias,
        trains_scale=needs_scale,
        bias_grad=bias.new_zeros((), dtype=torch.float64) if needs_bias else None,
        module_grads=tuple(widened(torch.zeros_like(p)) if needs else None for p, needs in zip(module, needs_module)),
    )


def finished(side: FeatureBlock, grad: Tensor, parameters: Parameters, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a side's features, times `factor`. If no backend summed the scale's, that follows from it."""
    grad.mul_(factor)
    if parameters.trains_scale and parameters.scale_grad is None:
        parameters.scale_grad = row_products(side.features, grad).sum() / parameters.scale
    return grad.to(dtype)


def undivided(call: LossCall, rows: FeatureBlock, parameters: Parameters) -> Visit:
    """Visits columns with all rows at once, whose gradient it adds to `rows.grad`."""

    def visit(cols: FeatureBlock, positive: int | None) -> None:
        call.backend.backward(Block(rows, cols, parameters, positive, call.inputs.captions))

    return visit


def striped(call: LossCall, rows: FeatureBlock, parameters: Parameters, out: Tensor, factor: Tensor) -> Visit:
    """Visits columns with STRIPE rows at a time, whose gradient, times `factor`, it writes to `out`."""

    def visit(cols: FeatureBlock, positive: int | None) -> None:
        block = Block(rows, cols, parameters, positive, call.inputs.captions)
        for stripe, grad in zip(block.tiles(STRIPE, len(cols)), out.split(STRIPE)):
            stripe.rows.grad = stripe.rows.empty_grad()
            call.backend.backward(stripe)
            grad.copy_(stripe.rows.grad.mul_(factor))

    return visit


def _gradient_dtype(call: LossCall, features: Tensor) -> torch.dtype:
    later = features.dtype == torch.float16 and call.objective.pairwise
    return torch.float32 if later else features.dtype


@contextlib.contextmanager
def _arithmetic(call: LossCall, device: torch.device) -> Iterator[None]:
    """Autocast off, since features are cast already, and float32 matmuls in IEEE precision on CUDA."""
    matmuls: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    # A module keeps the caller's setting. Half-precision numbers widened to float32 multiply exactly in TF32, too.
    if device.type == "cuda" and call.similarity.homogeneous:
        matmuls = float32_matmuls("tf32" if call.inputs.dtype.itemsize == 2 else "ieee")
    with torch.autocast(device.type, enabled=False), matmuls:
        yield


@contextlib.contextmanager
def _replayed(state: RandomState | None) -> Iterator[None]:
    """Random numbers as from `state`, for tiles in the same order; afterwards they continue as if none were drawn."""
    if state is None:
        yield
        return
    with RandomState.now(state.device).preserved():
        state.restore()
        yield


def _reason(value: float, inputs: Sequence[Tensor]) -> str:
    """Why the loss is not finite."""
    counts = {name: int((~x.isfinite()).sum()) for name, x in zip(INPUTS, inputs)}
    reasons = [f"{name} has {count} non-finite numbers" for name, count in counts.items() if count]
    unknown = "this rank's inputs are finite; another rank's are not, or the scores overflow"
    return f"the contrastive loss is {value}: {'; '.join(reasons) or unknown}"
