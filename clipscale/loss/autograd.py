"""The loss as one differentiable function: each pass is an exchange's sweep over one of a backend's block functions.

Letters: n rows (images) and m columns (texts) of this rank, N rows of all ranks, D feature width.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipscale.common.rng import RandomState
from clipscale.loss.block import Block, Parameters, RowBlock, widened
from clipscale.loss.exchange import GRAD, LSE, Single
from clipscale.loss.inputs import Pair
from clipscale.loss.kept import Kept
from clipscale.loss.machine import float32_matmuls
from clipscale.loss.side_gradient import (
    SPARE_BYTES,
    Finished,
    Rounding,
    SlabGradient,
    SplitGradient,
    WholeGradient,
    is_large,
)
from clipscale.loss.similarity import Similarity

INPUTS = ("image_features", "text_features", "logit_scale", "logit_bias")


class Backend(Protocol):
    """The functions of a block; TorchBackend says what they do."""

    splits_rows: bool  # whether a block's rows may be given in several parts
    sums_scale_grad: bool  # does it sum the scale's gradient; otherwise scale dL/dscale = sum_i <u_i, dU_i> gives it
    sums_pairs: bool  # is the objective a sum over pairs: then there is forward_backward

    def padded_width(self, features: Tensor) -> int:
        """The width that the features are padded to with zeros, once, before they meet: at least their own."""

    def warm_up(self, block: Block) -> None:
        """Compile and load what a call on blocks like this one uses, once in a process. A backward pass follows if a side has `grad`."""

    def forward(self, block: Block) -> None: ...

    def backward(self, block: Block) -> None: ...

    def forward_backward(self, block: Block) -> None: ...


@dataclass
class LossCall:
    """One call of the loss: its parts, and everything that is not a differentiable tensor."""

    exchange: Single
    backend: Backend
    similarity: Similarity
    weights: tuple[float | None, float | None]  # N a_i and N b_j; None: no softmax in that direction
    masks: Pair  # of images and texts, or the other way round
    keys: Pair
    dtype: torch.dtype  # what the features are cast to
    fp32_precision: str  # of float32 matmuls on CUDA: "ieee" or "tf32"
    check: bool  # refuse a result that is not finite, which waits for the device
    trains: bool  # may a backward pass follow
    kept: Kept
    is_second: bool = False  # another call on the same exchange comes before; its backward pass comes after

    def own_blocks(self, image_features: Tensor, text_features: Tensor) -> tuple[RowBlock, RowBlock]:
        """This rank's rows and columns, with their weights, as the backend takes them."""
        rows, cols = (
            RowBlock(features.detach().to(self.dtype).contiguous(), mask, keys)
            for features, mask, keys in zip((image_features, text_features), self.masks, self.keys)
        )
        for side, weight in zip((rows, cols), self.weights):
            missing = self.backend.padded_width(side.features) - side.features.shape[-1]
            side.features = F.pad(side.features, (0, missing)) if missing else side.features
            if weight is not None:
                side.weight = widened(side.features.new_full((len(side),), weight))
                side.weight[len(rows) :] = 0  # a hard negative is the positive of no image
        return rows, cols

    def warm_up(self, rows: RowBlock, cols: RowBlock, parameters: Parameters, needed: Sequence[bool]) -> None:
        """The backend's, for the gradients of (images, texts) that are `needed`."""
        row, col = (replace(x[:1], grad=x[:1].empty_grad() if need else None) for x, need in zip((rows, cols), needed))
        self.backend.warm_up(Block(row, col, parameters, 0))


class ContrastiveLoss(torch.autograd.Function):
    """(call, image features, text features, scale, bias, *parameters of the similarity) -> the mean over all rows of all ranks.

    A softmax takes one matmul unit in the forward pass, which keeps the log-sum-exps, and three in the backward pass. A sum over pairs
    needs nothing from other pairs: one sweep in the forward pass finds its value and its gradients, with three units. A second backward
    pass through the same graph takes three more. Frozen inputs save units. Gradients are local: their sum over the ranks is the gradient
    of the mean.
    """

    @staticmethod
    def forward(ctx: Any, call: LossCall, image_features: Tensor, text_features: Tensor, *numbers: Tensor) -> Tensor:
        scale, bias, *_ = numbers
        device, exchange = image_features.device, call.exchange
        ctx.call, ctx.random = call, None if call.similarity.homogeneous else RandomState.now(device)
        ctx.count, ctx.grads = len(image_features) * exchange.size, None
        parameters = Parameters(scale, bias)
        needed = [call.trains and need for need in ctx.needs_input_grad[1:]]

        visits = itertools.count()

        def visit(cols: RowBlock, positive: int | None) -> None:
            call.backend.forward(Block(rows, cols, parameters, positive, (next(visits), 0, 0)))

        with _arithmetic(device, call):
            own = call.own_blocks(image_features, text_features)
            exchange.prepare(lambda: call.warm_up(*own, parameters, needed[:2]))
            rows, cols = exchange.spread(*own)
            rows.lse = None if rows.weight is None else rows.empty_lse()
            rows.target = scale.new_zeros(len(rows), dtype=torch.float64)
            if call.backend.sums_pairs and any(needed):
                like = image_features, text_features
                rounding = Rounding(scale.new_tensor(1 / ctx.count), in_units=True)
                ctx.grads = gradients(call, rows, cols, like, numbers, needed, rounding, call.backend.forward_backward)
            else:
                cols.lse = exchange.sweep(cols, None if cols.weight is None else LSE, visit)
            per_row = -rows.target
            for side in (rows, cols):
                if side.lse is not None and side.weight is not None:
                    side.lse.masked_fill_(side.lse == -torch.inf, 0)  # a hard negative whose pairs are all left out
                    per_row += (side.weight * side.lse)[: len(rows)]
            if exchange.failure is not None:
                per_row.fill_(torch.nan)
            bad_scale = (scale <= 0).double()
            total, bad_scales = exchange.total(torch.stack([exchange.own_rows(per_row).sum(), bad_scale])).unbind()

        rows.target = rows.grad = None
        kept = [side.present() for side in (rows, cols)]
        ctx.names = (len(numbers), *map(list, kept))
        ctx.save_for_backward(image_features, text_features, *numbers, *kept[0].values(), *kept[1].values())
        if call.check:
            _refuse_bad_result(total, bad_scales, call, dict(zip(INPUTS, (image_features, text_features, scale, bias))))
        return (total / ctx.count).to(scale.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call: LossCall = ctx.call
        number_count, row_names, col_names = ctx.names
        grads, ctx.grads = ctx.grads, None
        if grads is not None:
            sides = [None if x is None else x.times(grad_output) for x in grads[:2]]
            found = [*sides, *(None if x is None else x * grad_output for x in grads[2:])]
        else:
            image_features, text_features, *rest = ctx.saved_tensors
            numbers, rest = rest[:number_count], rest[number_count:]
            rows = RowBlock(**dict(zip(row_names, rest)))
            cols = RowBlock(**dict(zip(col_names, rest[len(row_names) :])))
            like, rounding = (image_features, text_features), Rounding(grad_output / ctx.count)
            needed, run = ctx.needs_input_grad[1:], call.backend.backward
            with _arithmetic(image_features.device, call), _replayed(ctx.random):
                grads = gradients(call, rows, cols, like, numbers, needed, rounding, run)
            found = [*(None if x is None else x.grad for x in grads[:2]), *grads[2:]]
        call.kept.visits.clear()
        if call.exchange.failure is not None and not call.is_second:
            raise call.exchange.failure
        return None, *(None if x is None else x.to(like) for x, like in zip(found, ctx.saved_tensors))


def gradients(
    call: LossCall, rows: RowBlock, cols: RowBlock, like: tuple[Tensor, Tensor], numbers: Sequence[Tensor],
    needed: Sequence[bool], rounding: Rounding, run: Callable[[Block], None],
) -> tuple[Any, ...]:  # fmt: skip
    """One sweep of a backend's function that adds gradients, and their rounding; None where none is `needed`.

    Finished for the features, which are like the caller's `like`, then tensors for the numbers.
    """
    exchange, backend = call.exchange, call.backend
    scale, bias, *module_parameters = numbers
    needs_images, needs_texts, needs_scale, needs_bias, *needs_module = needed
    # The scale's gradient comes from a side's products where the backend does not sum it.
    from_side = rounding.needs_products = needs_scale and not backend.sums_scale_grad
    parameters = Parameters(
        scale,
        bias,
        scale_grad=scale.new_zeros((), dtype=torch.float64) if needs_scale and not from_side else None,
        bias_grad=bias.new_zeros((), dtype=torch.float64) if needs_bias else None,
        module_grads=tuple(
            widened(torch.zeros_like(p)) if needs else None for p, needs in zip(module_parameters, needs_module)
        ),
    )
    images = texts = None
    if needs_images or (from_side and not needs_texts):
        whole = not (backend.splits_rows and is_large(rows, like[0]))
        kind = WholeGradient if whole else SlabGradient if exchange.visits == 1 else SplitGradient
        images = kind(rows, like[0], rounding)
    of_texts = replace(rounding, needs_products=from_side and images is None)  # one side's products are enough
    if needs_texts and exchange.size == 1 and backend.splits_rows and is_large(cols, like[1]):
        texts = SplitGradient(cols, like[1], of_texts, SPARE_BYTES)

    visits = itertools.count()

    def visit(cols: RowBlock, positive: int | None) -> None:
        number = next(visits)
        for row, row_part in images.parts() if images else [(0, rows)]:
            for col, col_part in texts.parts() if texts else [(0, cols)]:
                offset = None if positive is None else positive + row - col
                run(Block(row_part, col_part, parameters, offset, (number, row, col)))
        # The scores of these once more, for their gradient alone.
        for col, col_part in texts.later_parts() if texts else []:
            backend.backward(Block(replace(rows, grad=None), col_part, Parameters(scale, bias), -col, (number, 0, col)))

    text_sums = exchange.sweep(cols, GRAD if needs_texts and texts is None else None, visit)
    found: list[Finished | None] = [images.result().part(exchange.own_rows) if images else None, None]
    if texts:
        found[1] = texts.result()
    elif text_sums is not None:
        own = exchange.own_cols(cols.features), exchange.own_cols(text_sums)
        found[1] = of_texts.finished(*own, like[1])
    replicated = (parameters.scale_grad, parameters.bias_grad, *parameters.module_grads)
    scale_grad, *others = (
        None if grad is None else grad * rounding.factor * exchange.local_fraction for grad in replicated
    )
    products = [x.products for x in found if x is not None and x.products is not None]
    if from_side and products:
        scale_grad = products[0].sum() / scale
    return found[0] if needs_images else None, found[1], scale_grad, *others


@contextlib.contextmanager
def _arithmetic(device: torch.device, call: LossCall) -> Iterator[None]:
    """Autocast off, since features are cast already, and the requested precision of float32 matmuls on CUDA."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(device.type, enabled=False))
        # A module keeps the caller's setting. Half-precision numbers widened to float32 multiply exactly in TF32, too.
        if device.type == "cuda" and call.similarity.homogeneous:
            is_half = call.dtype in (torch.float16, torch.bfloat16)
            stack.enter_context(float32_matmuls("tf32" if is_half else call.fp32_precision))
        yield


@contextlib.contextmanager
def _replayed(state: RandomState | None) -> Iterator[None]:
    """Random numbers as from `state` on; afterwards they continue as if none had been drawn. The order of the tiles must be the same."""
    if state is None:
        yield
        return
    with RandomState.now(state.device).preserved():
        state.restore()
        yield


def _refuse_bad_result(total: Tensor, bad_scales: Tensor, call: LossCall, given: dict[str, Tensor]) -> None:
    """Raise, on all ranks alike, for a scale that is not positive or a loss that is not finite, with the reason if it is here."""
    value, wrong = torch.stack([total, bad_scales]).tolist()
    if wrong:
        raise ValueError(
            f"logit_scale is {float(given['logit_scale']):g} and must be positive: it is the multiplier itself, not its logarithm "
            "(pass log_scale.exp())"
        )
    if math.isfinite(value):
        return
    failed = call.exchange.failures()
    if call.exchange.failure is not None:
        raise call.exchange.failure
    if failed:
        raise RuntimeError("contrastive_loss failed on " + "; ".join(failed))
    reasons = [
        f"{name} has {count} non-finite numbers" for name, x in given.items() if (count := int((~x.isfinite()).sum()))
    ]
    for mask in call.masks:
        if mask is not None and not bool(mask.any(1).all()):
            sample = int((~mask.any(1)).nonzero()[0])
            reasons.append(f"a mask leaves sample {sample} without any token")
    unknown = "this rank's inputs are finite; either another rank's are not, or the scores overflow"
    raise ValueError(f"the contrastive loss is {value}: {'; '.join(reasons) or unknown}")
