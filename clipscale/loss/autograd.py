"""The loss as one differentiable function: each pass is an exchange's sweep over one of a backend's two block functions.

Letters: n rows (images) and m columns (texts) of this rank, N rows of all ranks, D feature width.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipscale.loss.block import Block, Parameters, RowBlock, widened
from clipscale.loss.exchange import Single
from clipscale.loss.inputs import Extras
from clipscale.loss.similarity import Similarity, row_products
from clipscale.rng import RandomState

SLAB = 2**15  # rows whose float32 gradient exists at a time, where it is rounded to half precision afterwards


class Backend(Protocol):
    """The two functions of a block; TorchBackend says what they do."""

    splits_rows: bool  # whether a block's rows may be given in several parts
    sums_scale_grad: (
        bool  # does backward sum the scale's gradient; otherwise scale dL/dscale = sum_i <u_i, dU_i> gives it
    )

    def forward(self, block: Block) -> None: ...

    def backward(self, block: Block) -> None: ...


@dataclass
class LossCall:
    """One call of the loss: its parts, and everything that is not a differentiable tensor."""

    exchange: Single
    backend: Backend
    similarity: Similarity
    weights: tuple[float | None, float | None]  # N a_i and N b_j; None: no softmax in that direction
    extras: Extras
    fp32_precision: str  # of float32 matmuls on CUDA: "ieee" or "tf32"
    check: bool  # refuse a result that is not finite, which waits for the device

    def own_blocks(self, image_features: Tensor, text_features: Tensor) -> tuple[RowBlock, RowBlock]:
        """This rank's rows and columns, with their weights."""
        rows, cols = self.extras.blocks(image_features, text_features)
        for side, weight in zip((rows, cols), self.weights):
            if weight is not None:
                side.weight = widened(side.features.new_full((len(side),), weight))
                side.weight[len(rows) :] = 0  # a hard negative is the positive of no image
        return rows, cols


class ContrastiveLoss(torch.autograd.Function):
    """(call, image features, text features, scale, bias, *parameters of the similarity) -> the mean over all rows of all ranks.

    The forward pass takes one matmul unit and keeps the log-sum-exps. The backward pass takes three, fewer where an input is frozen.
    Gradients are local: their sum over the ranks is the gradient of the mean.
    """

    @staticmethod
    def forward(ctx: Any, call: LossCall, image_features: Tensor, text_features: Tensor, *numbers: Tensor) -> Tensor:
        scale, bias, *_ = numbers
        device, exchange = image_features.device, call.exchange
        ctx.call, ctx.random = call, None if call.similarity.homogeneous else RandomState.now(device)
        parameters = Parameters(scale, bias)

        def visit(cols: RowBlock, positive: int | None) -> None:
            call.backend.forward(Block(rows, cols, parameters, positive))

        with _arithmetic(device, call):
            rows, cols = exchange.spread(*call.own_blocks(image_features, text_features))
            rows.lse = None if rows.weight is None else rows.empty_lse()
            rows.target = scale.new_zeros(len(rows), dtype=torch.float64)
            cols.lse = exchange.forward(cols, visit)
            per_row = -rows.target
            for side in (rows, cols):
                if side.lse is not None and side.weight is not None:
                    side.lse.masked_fill_(side.lse == -torch.inf, 0)  # a hard negative whose pairs are all left out
                    per_row += (side.weight * side.lse)[: len(rows)]
            bad_scale = (scale <= 0).double()
            total, bad_scales = exchange.total(torch.stack([exchange.own_rows(per_row).sum(), bad_scale])).unbind()

        rows.target = None
        kept = [side.present() for side in (rows, cols)]
        ctx.count, ctx.names = len(image_features) * exchange.size, (len(numbers), *map(list, kept))
        ctx.save_for_backward(image_features, text_features, *numbers, *kept[0].values(), *kept[1].values())
        if call.check:
            _refuse_bad_result(total, bad_scales, call, image_features, text_features, scale, bias)
        return (total / ctx.count).to(scale.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call: LossCall = ctx.call
        exchange = call.exchange
        number_count, row_names, col_names = ctx.names
        image_features, text_features, *rest = ctx.saved_tensors
        (scale, bias, *module_parameters), rest = rest[:number_count], rest[number_count:]
        rows, cols = RowBlock(**dict(zip(row_names, rest))), RowBlock(**dict(zip(col_names, rest[len(row_names) :])))
        _, needs_images, needs_texts, needs_scale, needs_bias, *needs_module = ctx.needs_input_grad
        from_rows = needs_scale and not call.backend.sums_scale_grad  # the scale's gradient, from a side's products
        parameters = Parameters(
            scale,
            bias,
            scale_grad=scale.new_zeros((), dtype=torch.float64) if needs_scale and not from_rows else None,
            bias_grad=bias.new_zeros((), dtype=torch.float64) if needs_bias else None,
            module_grads=tuple(
                widened(torch.zeros_like(p)) if needed else None for p, needed in zip(module_parameters, needs_module)
            ),
        )
        factor = grad_output / ctx.count
        in_slabs = exchange.visits == 1 and call.backend.splits_rows
        images = None
        if needs_images or (from_rows and not needs_texts):
            images = RowGradient(rows, image_features.dtype, factor, in_slabs, from_rows)

        def visit(cols: RowBlock, positive: int | None) -> None:
            for start, part in images.parts() if images else [(0, rows)]:
                call.backend.backward(Block(part, cols, parameters, None if positive is None else positive + start))

        with _arithmetic(image_features.device, call), _replayed(ctx.random):
            text_sums = exchange.backward(cols, visit, needs_texts)
            image_grad = text_grad = products = None
            if images:
                image_grad, products = (None if x is None else exchange.own_rows(x) for x in images.result())
            if text_sums is not None:
                own = exchange.own_cols(cols.features), exchange.own_cols(text_sums)
                text_grad, text_products = _finished(*own, text_features.dtype, factor, from_rows and products is None)
                products = text_products if products is None else products
        replicated = (
            (scale, parameters.scale_grad),
            (bias, parameters.bias_grad),
            *zip(module_parameters, parameters.module_grads),
        )
        scale_grad, *others = (
            None if grad is None else (grad * factor * exchange.local_fraction).to(x.dtype) for x, grad in replicated
        )
        if products is not None:
            scale_grad = (products.sum() / scale).to(scale.dtype)
        return None, image_grad if needs_images else None, text_grad, scale_grad, *others


class RowGradient:
    """dU and, with `products`, <u_i, dU_i> for each row. Sums are float32 (float64); dU is returned in `dtype`.

    In half precision, and where the rows are visited once, `parts` gives them in slabs: dU never exists as a whole in float32.
    """

    def __init__(self, rows: RowBlock, dtype: torch.dtype, factor: Tensor, in_slabs: bool, products: bool) -> None:
        self._rows, self._rounding = rows, (dtype, factor, products)
        self._done: tuple[Tensor, Tensor | None] | None = None
        if in_slabs and dtype.itemsize < 4 and len(rows) > SLAB:
            self._done = (
                torch.empty_like(rows.features, dtype=dtype),
                torch.empty_like(rows.features[:, 0], dtype=torch.float64) if products else None,
            )
        else:
            rows.grad = rows.empty_grad()

    def parts(self) -> Iterator[tuple[int, RowBlock]]:
        """The index of the first row, and rows with a place for their gradient."""
        if self._done is None:
            yield 0, self._rows
            return
        for start in range(0, len(self._rows), SLAB):
            part = self._rows[start : start + SLAB]
            part.grad = part.empty_grad()
            yield start, part
            for whole, piece in zip(self._done, _finished(part.features, part.grad, *self._rounding)):
                if whole is not None and piece is not None:
                    whole[start : start + SLAB] = piece

    def result(self) -> tuple[Tensor, Tensor | None]:
        """dU and, in float64, the products; both times the factor."""
        if self._done is not None:
            return self._done
        assert self._rows.grad is not None
        return _finished(self._rows.features, self._rows.grad, *self._rounding)


def _finished(
    features: Tensor, grad: Tensor, dtype: torch.dtype, factor: Tensor, products: bool
) -> tuple[Tensor, Tensor | None]:
    """(grad * factor in `dtype`; with `products`, <row of features, row of it> in float64). Reuses grad's memory.

    Half precision is written where grad lies: the loss has no memory for a second copy of a million rows.
    """
    grad.mul_(factor)
    found = row_products(features, grad) if products else None
    if dtype.itemsize >= grad.dtype.itemsize:
        return grad.to(dtype), found
    rounded = grad.view(-1).view(dtype)[: grad.numel()].view(grad.shape)
    step = max(1, SLAB // 4)
    for start in range(0, len(grad), step):  # row i is written where row i/2 was, never over a later row
        rounded[start : start + step] = grad[start : start + step].to(dtype)
    return rounded, found


@contextlib.contextmanager
def _arithmetic(device: torch.device, call: LossCall) -> Iterator[None]:
    """Autocast off, since features are cast already, and the requested precision of float32 matmuls on CUDA."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(device.type, enabled=False))
        # A module keeps the caller's setting. Half-precision numbers widened to float32 multiply exactly in TF32, too.
        if device.type == "cuda" and call.similarity.homogeneous:
            is_half = call.extras.dtype in (torch.float16, torch.bfloat16)
            matmul = torch.backends.cuda.matmul
            stack.callback(setattr, matmul, "fp32_precision", matmul.fp32_precision)
            matmul.fp32_precision = "tf32" if is_half else call.fp32_precision
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


def _refuse_bad_result(
    total: Tensor,
    bad_scales: Tensor,
    call: LossCall,
    image_features: Tensor,
    text_features: Tensor,
    scale: Tensor,
    bias: Tensor,
) -> None:
    """ValueError, on all ranks alike, for a scale that is not positive or a loss that is not finite, with the reason if it is here."""
    value, wrong = torch.stack([total, bad_scales]).tolist()
    if wrong:
        raise ValueError(
            f"logit_scale is {float(scale):g} and must be positive: it is the multiplier itself, not its logarithm (pass log_scale.exp())"
        )
    if math.isfinite(value):
        return
    given = {"image_features": image_features, "text_features": text_features, "logit_scale": scale, "logit_bias": bias}
    reasons = [
        f"{name} has {count} non-finite numbers" for name, x in given.items() if (count := int((~x.isfinite()).sum()))
    ]
    for mask in call.extras.masks:
        if mask is not None and not bool(mask.any(1).all()):
            sample = int((~mask.any(1)).nonzero()[0])
            reasons.append(f"a mask leaves sample {sample} without any token")
    reason = (
        "; ".join(reasons) or "this rank's inputs are finite; either another rank's are not, or the scores overflow"
    )
    raise ValueError(f"the contrastive loss is {value}: {reason}")
