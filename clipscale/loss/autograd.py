"""The loss as one differentiable function: each pass is an exchange's sweep over one of a backend's two functions.

Letters: n rows (images) and m columns (texts) of this rank, N rows of all ranks, D feature width.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipscale.common.rng import RandomState
from clipscale.loss.block import Block, Parameters, RowBlock, widened
from clipscale.loss.exchange import GRAD, LSE, Single
from clipscale.loss.inputs import Inputs
from clipscale.loss.machine import float32_matmuls
from clipscale.loss.similarity import Similarity, row_products

INPUTS = ("image_features", "text_features", "logit_scale", "logit_bias")
STRIPE = 2**16  # rows whose gradients one process sums at a time: some panels of the Triton backend


class Backend(Protocol):
    """The functions of a block; TorchBackend says what they do."""

    width_step: int
    sums_scale_grad: bool
    sums_pairs: bool
    other_lses: int

    def missing_factor(self, scale: Tensor) -> Tensor | float: ...

    def forward(self, block: Block) -> None: ...

    def backward(self, block: Block) -> None: ...


@dataclass
class LossCall:
    """One call of the loss: its parts, and everything that is not a differentiable tensor."""

    exchange: Single
    backend: Backend
    similarity: Similarity
    weights: tuple[float | None, float | None]  # N a_i and N b_j; None: no softmax in that direction
    inputs: Inputs  # for all but the features
    check: bool  # refuse a result that is not finite, which waits for the device
    trains: bool  # may a backward pass follow

    def local_blocks(self, image_features: Tensor, text_features: Tensor) -> tuple[RowBlock, RowBlock]:
        """This rank's rows and columns, with their weights, as the backend takes them."""
        rows, cols = (
            RowBlock(features.detach().to(self.inputs.dtype).contiguous(), *given)
            for features, *given in zip((image_features, text_features), *self.inputs.pairs().values())
        )
        captions = self.inputs.captions
        for side, weight, texts in zip((rows, cols), self.weights, (1, captions)):
            missing = -side.features.shape[-1] % self.backend.width_step
            side.features = F.pad(side.features, (0, missing)) if missing else side.features
            if weight is not None:
                side.weight = widened(side.features.new_full((len(side),), weight / texts))
                side.weight[len(rows) * captions :] = 0  # a hard negative is the positive of no image
        return rows, cols


class ContrastiveLoss(torch.autograd.Function):
    """(call, images, texts, scale, bias, *the similarity's parameters) -> the mean over all ranks' rows.

    A softmax takes one matmul unit in the forward pass, which keeps the log-sum-exps, and three in the backward pass. A
    sum over pairs needs nothing from other pairs: one sweep in the forward pass finds its value and its gradients, with
    three units. A second backward pass through the same graph takes three more. Frozen inputs save units. Gradients are
    local: their sum over the ranks is the gradient of the mean.
    """

    @staticmethod
    def forward(ctx: Any, call: LossCall, image_features: Tensor, text_features: Tensor, *numbers: Tensor) -> Tensor:
        scale, bias, *_ = numbers
        exchange, backend = call.exchange, call.backend
        ctx.call, ctx.grads, ctx.count = call, None, len(image_features) * exchange.size
        ctx.random = None if call.similarity.homogeneous else RandomState.now(image_features.device)
        needed = [call.trains and need for need in ctx.needs_input_grad[1:]]

        def visit(cols: RowBlock, positive: int | None) -> None:
            backend.forward(Block(rows, cols, Parameters(scale, bias), positive))

        with _arithmetic(call, image_features.device):
            rows, cols = exchange.spread(*call.local_blocks(image_features, text_features))
            rows.target = scale.new_zeros(len(rows), dtype=torch.float64)
            has_sums = call.weights != (None, None)
            if has_sums or not any(needed):
                count = backend.other_lses
                if rows.weight is not None:
                    rows.lse, rows.others = rows.empty_lse(), rows.empty_lse(count) if count else None
                others = replace(LSE, field="others", empty=lambda cols: cols.empty_lse(count))
                sums = [] if cols.weight is None else [LSE, others] if count else [LSE]
                for s, x in zip(sums, exchange.sweep(cols, sums, visit)):
                    setattr(cols, s.field, x)
            if backend.sums_pairs and (has_sums or any(needed)):
                like = image_features, text_features
                grads = gradients(call, rows, cols, like, numbers, needed, scale.new_tensor(1 / ctx.count))
                ctx.grads = grads if any(needed) else None
            per_row = -rows.target
            for side in (rows, cols):
                if side.lse is not None and side.weight is not None:
                    side.lse.masked_fill_(side.lse == -torch.inf, 0)  # a hard negative whose pairs are all left out
                    per_row += (side.weight * side.lse)[: len(rows)]
            local = exchange.local_rows(per_row).sum()
            if cols.lse is not None and cols.weight is not None and call.inputs.captions > 1:
                local += exchange.local_cols(cols.weight * cols.lse)[len(image_features) :].sum()
            total = exchange.total(local)

        rows.target = rows.grad = None
        ctx.names = (len(numbers), [*rows.present()], [*cols.present()])
        sides = [*rows.present().values(), *cols.present().values()]
        ctx.save_for_backward(image_features, text_features, *numbers, *sides)
        if call.check and not math.isfinite(total):
            raise ValueError(_reason(float(total), dict(zip(INPUTS, (image_features, text_features, scale, bias)))))
        return (total / ctx.count).to(scale.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call, (number_count, row_names, col_names) = ctx.call, ctx.names
        inputs = ctx.saved_tensors[: 2 + number_count]
        grads, ctx.grads = ctx.grads, None
        if grads is not None:
            grads = [None if x is None else x.mul_(grad_output) for x in grads]
        else:
            sides = ctx.saved_tensors[2 + number_count :]
            rows = RowBlock(**dict(zip(row_names, sides)))
            cols = RowBlock(**dict(zip(col_names, sides[len(row_names) :])))
            with _arithmetic(call, inputs[0].device), _replayed(ctx.random):
                needed, factor = ctx.needs_input_grad[1:], grad_output / ctx.count
                grads = gradients(call, rows, cols, inputs[:2], inputs[2:], needed, factor)
        return None, *(None if x is None else x.to(like.dtype) for x, like in zip(grads, inputs))


def gradients(
    call: LossCall, rows: RowBlock, cols: RowBlock, like: Sequence[Tensor], numbers: Sequence[Tensor],
    needed: Sequence[bool], factor: Tensor,
) -> list[Tensor | None]:  # fmt: skip
    """One sweep of the backend's backward function: the gradients of features and numbers, times `factor`.

    None where none is `needed`. Those of features are in the type of the caller's features `like`; of float16, whose
    few exponents a later factor would not fit, in float32 if they are found in the forward pass.
    """
    exchange, backend = call.exchange, call.backend
    scale, bias, *module_parameters = numbers
    needs_images, needs_texts, needs_scale, needs_bias, *needs_module = needed
    # The scale's gradient comes from the products of one side where the backend does not sum it.
    from_side = needs_scale and not backend.sums_scale_grad
    parameters = Parameters(
        scale,
        bias,
        scale_grad=scale.new_zeros((), dtype=torch.float64) if needs_scale and not from_side else None,
        bias_grad=bias.new_zeros((), dtype=torch.float64) if needs_bias else None,
        module_grads=tuple(
            widened(torch.zeros_like(p)) if needs else None for p, needs in zip(module_parameters, needs_module)
        ),
    )
    side_factor = factor * backend.missing_factor(scale)
    types = [torch.float32 if x.dtype == torch.float16 and backend.sums_pairs else x.dtype for x in like]
    # One process visits its rows once: they are done stripe by stripe, and only the texts' sums are held whole. A
    # module's tiles keep their order, since it may draw random numbers.
    in_stripes = exchange.size == 1 and call.similarity.homogeneous and needs_images and needs_texts
    in_stripes = in_stripes and len(rows) > STRIPE
    images = torch.empty_like(like[0], dtype=types[0]) if in_stripes else None
    if not in_stripes and (needs_images or (from_side and not needs_texts)):
        rows.grad = rows.empty_grad()

    def visit(cols: RowBlock, positive: int | None) -> None:
        block = Block(rows, cols, parameters, positive)
        if images is None:
            backend.backward(block)
            return
        for start in range(0, len(rows), STRIPE):
            stripe = block.tile(start, STRIPE, 0, len(cols))
            stripe.rows.grad = stripe.rows.empty_grad()
            backend.backward(stripe)
            images[start : start + STRIPE] = _unpadded(stripe.rows.grad.mul_(side_factor), images)

    text_sums = next(iter(exchange.sweep(cols, [GRAD] if needs_texts else [], visit)), None)
    replicated = (parameters.scale_grad, parameters.bias_grad, *parameters.module_grads)
    scale_grad, *others = (None if grad is None else grad * factor * exchange.local_fraction for grad in replicated)
    features: list[Tensor | None] = []
    sides = [(rows, rows.grad, exchange.local_rows), (cols, text_sums, exchange.local_cols)]
    rows.grad = None
    for wanted, dtype in zip(like, types):  # the first side's sums are freed before the second's gradient is made
        side, sums, local = sides.pop(0)
        if sums is None:
            features.append(None)
            continue
        grad = local(sums).mul_(side_factor)
        if from_side and scale_grad is None:
            scale_grad = row_products(local(side.features), grad).sum() / scale
        features.append(_unpadded(grad, wanted).to(dtype).contiguous())
    return [images if in_stripes else features[0] if needs_images else None, features[1], scale_grad, *others]


def _unpadded(x: Tensor, like: Tensor) -> Tensor:
    return x[..., : like.shape[-1]] if like.dim() > 1 else x


@contextlib.contextmanager
def _arithmetic(call: LossCall, device: torch.device) -> Iterator[None]:
    """Autocast off, since features are cast already, and float32 matmuls in IEEE precision on CUDA."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(device.type, enabled=False))
        # A module keeps the caller's setting. Half-precision numbers widened to float32 multiply exactly in TF32, too.
        if device.type == "cuda" and call.similarity.homogeneous:
            types = [call.inputs.dtype, *(x.dtype for x in call.inputs.teachers if x is not None)]
            stack.enter_context(float32_matmuls("tf32" if all(x.itemsize == 2 for x in types) else "ieee"))
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


def _reason(value: float, given: dict[str, Tensor]) -> str:
    """Why the loss is not finite."""
    reasons = [
        f"{name} has {count} non-finite numbers" for name, x in given.items() if (count := int((~x.isfinite()).sum()))
    ]
    unknown = "this rank's inputs are finite; another rank's are not, or the scores overflow"
    return f"the contrastive loss is {value}: {'; '.join(reasons) or unknown}"
