"""The loss as one differentiable function.

In each pass the exchange brings the columns of all ranks, and the backend computes this rank's rows against them, block
by block.

Letters: n rows (images) and m columns (texts) of this rank, N rows of all ranks, D feature width.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipscale.common.rng import RandomState
from clipscale.loss.block import Block, BlockSide, LossParameters, sum_dtype, to_sum_dtype
from clipscale.loss.exchange import GRAD, LOG_SUM_EXP, ComputeFn, Exchange
from clipscale.loss.inputs import Inputs
from clipscale.loss.objective import Objective
from clipscale.loss.precision import matmul_precision
from clipscale.loss.similarity import Similarity, row_products

# The first inputs of the loss, in order, as messages name them.
INPUT_NAMES = ("image_features", "text_features", "logit_scale", "logit_bias")
STRIPE = 2**16  # rows whose gradients are summed at a time: a few panels of the Triton backend


class Backend(Protocol):
    """Computes a block in both passes; see TorchBackend."""

    def forward(self, block: Block) -> None: ...

    def backward(self, block: Block) -> None: ...


@dataclass
class LossCall:
    """One call of the loss: everything but its differentiable tensors."""

    exchange: Exchange
    backend: Backend
    similarity: Similarity
    objective: Objective
    inputs: Inputs  # its features are replaced by those that autograd passes
    check: bool  # refuse a result that is not finite, which waits for the device
    needs_backward: bool  # whether a backward pass may follow

    def local_sides(self, image_features: Tensor, text_features: Tensor) -> tuple[BlockSide, BlockSide]:
        """This rank's rows and columns, with their weights."""
        inputs = self.inputs
        num_images = len(image_features)
        captions_per_image = inputs.positive_layout.captions_per_image
        row_weight, col_weight = self.objective.direction_weights
        rows = replace(inputs.rows, features=self._cast(image_features))
        if row_weight is not None:
            rows.lse_weight = _lse_weights(rows.features, row_weight, num_images)
        cols = replace(inputs.cols, features=self._cast(text_features))
        if col_weight is not None:
            # A hard negative is the positive of no image: it has no weight.
            paired = num_images * captions_per_image
            cols.lse_weight = _lse_weights(cols.features, col_weight / captions_per_image, paired)
        return rows, cols

    def _cast(self, features: Tensor) -> Tensor:
        return features.detach().to(self.inputs.dtype).contiguous()


def _lse_weights(features: Tensor, weight: float, paired: int) -> Tensor:
    """(n,) in sum_dtype: `weight` for the first `paired` features, 0 for the others."""
    weights = features.new_full((len(features),), weight, dtype=sum_dtype(features.dtype))
    weights[paired:] = 0
    return weights


class NeedsGrad(NamedTuple):
    """Which inputs of a call need their gradient."""

    images: bool
    texts: bool
    scale: bool
    bias: bool
    # One for each parameter of a similarity module.
    module: tuple[bool, ...]

    @classmethod
    def from_flags(cls, needed: Sequence[bool]) -> "NeedsGrad":
        """The needs, from one entry for each tensor of `ContrastiveLoss`."""
        images, texts, scale, bias, *module = needed
        return cls(images, texts, scale, bias, tuple(module))


class ContrastiveLoss(torch.autograd.Function):
    """(call, images, texts, scale, bias, *the similarity's parameters) -> the mean over all ranks' rows.

    Costs are in matrix products of all rows with all columns, 2 n m D FLOP each. A softmax takes one in the forward
    pass, which keeps the log-sum-exps, and three in the backward pass. A pairwise objective takes three in all: one
    sweep in the forward pass computes its value and its gradients. A second backward pass through the same graph takes
    three more. Frozen inputs save products. Gradients are local: their sum over the ranks is the gradient of the mean.
    """

    @staticmethod
    def forward(ctx: Any, call: LossCall, *inputs: Tensor) -> Tensor:
        images, texts, scale, bias, *_ = inputs
        ctx.call = call
        ctx.grads = None
        ctx.count = len(images) * call.exchange.size
        ctx.random = None if call.similarity.is_dot_product else RandomState.now(images.device)
        with matmul_precision(call.inputs, call.similarity):
            rows, cols = call.local_sides(images, texts)
            rows.row_loss = scale.new_zeros(len(rows), dtype=torch.float64)
            if not call.objective.is_pairwise:
                forward_sweep(call, rows, cols, LossParameters(scale, bias))
            else:
                needed = [call.needs_backward and needs for needs in ctx.needs_input_grad[1:]]
                grads = backward_sweep(
                    call, rows, cols, inputs, NeedsGrad.from_flags(needed), scale.new_tensor(1 / ctx.count)
                )
                ctx.grads = grads if any(needed) else None
            total = call.exchange.all_reduce_sum(local_loss_sum(rows, cols))

        if call.check and not math.isfinite(total):
            raise ValueError(explain_non_finite(call, float(total), inputs))
        rows.row_loss = None
        ctx.save_for_backward(*inputs, *rows.pack(), *cols.pack())
        return (total / ctx.count).to(scale.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        needed = ctx.needs_input_grad[1:]
        saved = iter(ctx.saved_tensors)
        inputs = list(islice(saved, len(needed)))
        rows = BlockSide.unpack(saved)
        cols = BlockSide.unpack(saved)
        grads = ctx.grads
        ctx.grads = None
        if grads is not None:
            grads = [None if x is None else x.mul_(grad_output) for x in grads]
        else:
            with matmul_precision(call.inputs, call.similarity), replay_rng(ctx.random):
                grads = backward_sweep(call, rows, cols, inputs, NeedsGrad.from_flags(needed), grad_output / ctx.count)
        return None, *(None if x is None else x.to(like.dtype) for x, like in zip(grads, inputs))


def forward_sweep(call: LossCall, rows: BlockSide, cols: BlockSide, parameters: LossParameters) -> None:
    """A collective: one sweep of the backend's forward function. Sets `lse` of rows and columns that have weights, and
    adds to `rows.row_loss`."""
    if rows.lse_weight is not None:
        rows.lse = rows.initial_lse()
    reductions = [] if cols.lse_weight is None else [LOG_SUM_EXP]
    column_sums = call.exchange.sweep(cols, reductions, make_compute_fn(call.backend.forward, call, rows, parameters))
    if cols.lse_weight is not None:
        cols.lse = column_sums[0]


def local_loss_sum(rows: BlockSide, cols: BlockSide) -> Tensor:
    """This rank's part of the loss, times the number of pairs: the weighted log-sum-exps and `rows.row_loss`, 0-d."""
    assert rows.row_loss is not None
    value = rows.row_loss.sum()
    for side in (rows, cols):
        if side.lse is not None and side.lse_weight is not None:
            value += (side.lse_weight * side.lse).sum()
    return value


def backward_sweep(
    call: LossCall,
    rows: BlockSide,
    cols: BlockSide,
    inputs: Sequence[Tensor],
    needs: NeedsGrad,
    factor: Tensor,
) -> list[Tensor | None]:
    """A collective: one sweep of the backend's backward function. Returns the inputs' gradients of the summed loss,
    times `factor`.

    An entry is None if its input needs no gradient. The scale's gradient may be computed even if it is not needed;
    autograd then ignores it. Where each gradient comes from:

        images         `rows.grad`, to which every block adds; in one process with many rows stripe by stripe
        texts          the exchange's reduction GRAD, which adds all ranks' parts
        scale          the backend's sum, if it makes one; else `_scale_grad`, from the gradient of the features
        bias, module   the backend's sums, in `parameters`

    Gradients of features have the features' type. A pairwise objective computes them in the forward pass, and the
    backward pass scales them later. Until then the gradients of float16 features are float32, whose range suffices.
    """
    images, texts, *shared = inputs
    parameters = parameters_with_sums(shared, needs)
    image_grad = None
    if needs.images and needs.texts and _takes_stripes(call, rows):
        image_grad = torch.empty_like(images, dtype=_gradient_dtype(call, images))
        compute = make_striped_compute_fn(call, rows, parameters, image_grad, factor)
    else:
        if needs.images or (needs.scale and not needs.texts):
            rows.grad = rows.zero_grad_buffer()
        compute = make_compute_fn(call.backend.backward, call, rows, parameters)
    reductions = [GRAD] if needs.texts else []
    column_sums = call.exchange.sweep(cols, reductions, compute)
    text_sum = column_sums.pop() if needs.texts else None
    for x in (parameters.scale_grad, parameters.bias_grad, *parameters.module_grads, rows.grad, text_sum):
        if x is not None:
            x.mul_(factor)
    if needs.scale and parameters.scale_grad is None:  # no backend has summed it
        parameters.scale_grad = _scale_grad(rows, cols, text_sum, parameters.scale)
    if needs.images and rows.grad is not None:
        image_grad = rows.grad.to(_gradient_dtype(call, images))
    rows.grad = None  # its memory is free before the texts' gradient is cast
    text_grad = None if text_sum is None else text_sum.to(_gradient_dtype(call, texts))
    return [image_grad, text_grad, parameters.scale_grad, parameters.bias_grad, *parameters.module_grads]


def _scale_grad(rows: BlockSide, cols: BlockSide, text_sum: Tensor | None, scale: Tensor) -> Tensor | None:
    """The scale's gradient, by s dL/ds = sum_i <u_i, dU_i>, or the same of the texts. None if neither has a gradient.

    `text_sum`: the gradient of the columns' features.
    """
    if rows.grad is not None:
        return row_products(rows.features, rows.grad).sum() / scale
    if text_sum is not None:
        return row_products(cols.features, text_sum).sum() / scale
    return None


def _takes_stripes(call: LossCall, rows: BlockSide) -> bool:
    """Whether the image gradient is computed stripe by stripe: then only the text gradient is a whole float32 tensor.

    This needs a single process and the dot product: a module's random numbers depend on the order of tiles.
    """
    return call.exchange.size == 1 and call.similarity.is_dot_product and len(rows) > STRIPE


def parameters_with_sums(parameters: Sequence[Tensor], needs: NeedsGrad) -> LossParameters:
    """The scale, the bias and a module's parameters, with zeros for the gradients of those that need one."""
    scale, bias, *module = parameters
    return LossParameters(
        scale,
        bias,
        trains_scale=needs.scale,
        bias_grad=bias.new_zeros((), dtype=torch.float64) if needs.bias else None,
        module_grads=tuple(
            to_sum_dtype(torch.zeros_like(p)) if is_needed else None for p, is_needed in zip(module, needs.module)
        ),
    )


def make_compute_fn(
    function: Callable[[Block], None], call: LossCall, rows: BlockSide, parameters: LossParameters
) -> ComputeFn:
    """A function that computes columns against all rows at once, by one of the backend's two functions."""

    def compute(cols: BlockSide, positive_offset: int | None) -> None:
        function(Block(rows, cols, parameters, positive_offset, call.inputs.positive_layout))

    return compute


def make_striped_compute_fn(
    call: LossCall, rows: BlockSide, parameters: LossParameters, out: Tensor, factor: Tensor
) -> ComputeFn:
    """A function that runs the backward function on STRIPE rows at a time, and writes their gradient, times `factor`,
    to `out`."""

    def compute(cols: BlockSide, positive_offset: int | None) -> None:
        block = Block(rows, cols, parameters, positive_offset, call.inputs.positive_layout)
        for stripe, grad in zip(block.split(STRIPE, len(cols)), out.split(STRIPE)):
            stripe.rows.grad = stripe.rows.zero_grad_buffer()
            call.backend.backward(stripe)
            grad.copy_(stripe.rows.grad.mul_(factor))

    return compute


def _gradient_dtype(call: LossCall, features: Tensor) -> torch.dtype:
    """The type of the features' gradient: theirs, or float32 for float16 if the backward pass scales it later."""
    is_scaled_later = features.dtype == torch.float16 and call.objective.is_pairwise
    return torch.float32 if is_scaled_later else features.dtype


@contextlib.contextmanager
def replay_rng(state: RandomState | None) -> Iterator[None]:
    """In this context, random numbers are drawn as from `state`, for tiles in the same order. Restores the generators
    after.

    Does nothing for None.
    """
    if state is None:
        yield
        return
    with RandomState.now(state.device).preserved():
        state.restore()
        yield


def explain_non_finite(call: LossCall, value: float, inputs: Sequence[Tensor]) -> str:
    """Why the loss of a call is not finite."""
    named = dict(zip(INPUT_NAMES, inputs)) | call.objective.target_inputs_by_name(call.inputs)
    counts = {name: int((~x.isfinite()).sum()) for name, x in named.items()}
    reasons = [f"{name} has {count} non-finite numbers" for name, count in counts.items() if count]
    if call.exchange.size == 1:
        unknown = "the inputs are finite: the scores overflow"
    else:
        unknown = "this rank's inputs are finite; another rank's are not, or the scores overflow"
    return f"the {call.objective.function_name.replace('_', ' ')} is {value}: {'; '.join(reasons) or unknown}"
