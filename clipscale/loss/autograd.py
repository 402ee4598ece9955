"""The loss as one differentiable function: an exchange's sweep, once per pass, over a backend's two block functions.

Letters: n rows (images) and m columns (texts) that this rank brings, N rows of all ranks, D feature width.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipscale.loss.block import Block, Shared, Side
from clipscale.loss.exchange import Single
from clipscale.loss.similarity import Similarity, row_products, widened
from clipscale.rng import RandomState

SLAB = 2**15  # rows whose float32 gradient is held at a time, where it has to be rounded to half precision afterwards


class Backend(Protocol):
    """What works on a block; see TorchBackend for what the two functions have to do."""

    splits: bool  # may it be given a block's rows in several parts
    sums_scale_grad: bool  # does it add up the scale's gradient; otherwise that follows from a side's, scale dL/dscale = sum_i <u_i, dU_i>

    def merge(self, block: Block) -> None: ...

    def add_gradients(self, block: Block) -> None: ...


@dataclass
class Loss:
    """Everything about one call of the loss that is not a differentiable tensor."""

    exchange: Single
    backend: Backend
    similarity: Similarity
    weights: tuple[float | None, float | None]  # N a_i and N b_j; None: no softmax in that direction
    operands: torch.dtype  # what the features are cast to
    masks: tuple[Tensor | None, Tensor | None]  # of rows and columns
    keys: tuple[Tensor | None, Tensor | None]
    fp32_precision: str  # of float32 matmuls on CUDA: "ieee" or "tf32"
    check: bool  # look at the result, which waits for the device, and refuse one that is not finite

    def own_sides(self, image_features: Tensor, text_features: Tensor) -> tuple[Side, Side]:
        """This rank's rows and columns."""
        rows, cols = (
            Side(features.detach().to(self.operands).contiguous(), mask, keys)
            for features, mask, keys in zip((image_features, text_features), self.masks, self.keys)
        )
        for side, weight in zip((rows, cols), self.weights):
            if weight is not None:
                side.weight = widened(side.features.new_full((len(side),), weight))
                side.weight[len(rows) :] = 0  # a hard negative is nobody's positive
        return rows, cols


class ContrastiveLoss(torch.autograd.Function):
    """(loss, image features, text features, scale, bias, *parameters of the similarity) -> the mean over all rows of all ranks.

    The forward pass takes one matmul unit and keeps the log-sum-exps; the backward pass takes three, fewer where an input is frozen.
    Gradients are shares: their sum over the ranks is the gradient of the mean.
    """

    @staticmethod
    def forward(ctx: Any, loss: Loss, image_features: Tensor, text_features: Tensor, *numbers: Tensor) -> Tensor:
        scale, bias, *_ = numbers
        device, exchange = image_features.device, loss.exchange
        ctx.loss, ctx.random = loss, None if loss.similarity.homogeneous else RandomState.now(device)
        shared = Shared(scale, bias)

        def merge(cols: Side, positive: int | None) -> None:
            loss.backend.merge(Block(rows, cols, shared, positive))

        with _arithmetic(device, loss):
            rows, cols = exchange.spread(*loss.own_sides(image_features, text_features))
            rows.lse, rows.target = _no_terms(rows), scale.new_zeros(len(rows), dtype=torch.float64)
            cols.lse = exchange.sweep(cols, "lse", _no_terms, merge)
            per_row = -rows.target
            for side in (rows, cols):
                if side.lse is not None and side.weight is not None:
                    side.lse.masked_fill_(side.lse == -torch.inf, 0)  # a hard negative whose every pair was left out
                    per_row += (side.weight * side.lse)[: len(rows)]
            mistaken = (scale <= 0).double()
            total, mistakes = exchange.total(torch.stack([exchange.own(per_row).sum(), mistaken])).unbind()

        rows.target = None
        kept = [side.present() for side in (rows, cols)]
        ctx.count, ctx.names = len(image_features) * exchange.size, (len(numbers), *map(list, kept))
        ctx.save_for_backward(image_features, text_features, *numbers, *kept[0].values(), *kept[1].values())
        if loss.check:
            _refuse_nonsense(total, mistakes, loss, image_features, text_features, scale, bias)
        return (total / ctx.count).to(scale.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        loss: Loss = ctx.loss
        exchange = loss.exchange
        count, row_names, col_names = ctx.names
        image_features, text_features, *rest = ctx.saved_tensors
        (scale, bias, *parameters), rest = rest[:count], rest[count:]
        rows, cols = Side(**dict(zip(row_names, rest))), Side(**dict(zip(col_names, rest[len(row_names) :])))
        _, for_images, for_texts, for_scale, for_bias, *for_parameters = ctx.needs_input_grad
        follows = for_scale and not loss.backend.sums_scale_grad  # the scale's gradient, from a side's
        shared = Shared(
            scale,
            bias,
            scale_grad=scale.new_zeros((), dtype=torch.float64) if for_scale and not follows else None,
            bias_grad=bias.new_zeros((), dtype=torch.float64) if for_bias else None,
            parameter_grads=tuple(
                widened(torch.zeros_like(p)) if wanted else None for p, wanted in zip(parameters, for_parameters)
            ),
        )
        factor = grad_output / ctx.count
        through_images = for_images or (follows and not for_texts)
        once = exchange.visits == 1 and loss.backend.splits
        images = RowGradient(rows, image_features.dtype, factor, once, follows) if through_images else None

        def add_gradients(cols: Side, positive: int | None) -> None:
            for start, part in images.parts() if images else [(0, rows)]:
                loss.backend.add_gradients(Block(part, cols, shared, None if positive is None else positive + start))

        with _arithmetic(image_features.device, loss), _replayed(ctx.random):
            text_sums = exchange.sweep(cols, "grad", _no_gradient if for_texts else lambda _: None, add_gradients)
            image_grad = text_grad = products = None
            if images:
                image_grad, products = (None if x is None else exchange.own(x) for x in images.result())
            if text_sums is not None:
                own = exchange.own_cols(cols.features), exchange.own_cols(text_sums)
                text_grad, text_products = _finished(*own, text_features.dtype, factor, follows and products is None)
                products = text_products if products is None else products
        replicated = (
            (scale, shared.scale_grad),
            (bias, shared.bias_grad),
            *zip(parameters, shared.parameter_grads),
        )
        scale_grad, *others = (
            None if grad is None else (grad * factor * exchange.share).to(x.dtype) for x, grad in replicated
        )
        if products is not None:
            scale_grad = (products.sum() / scale).to(scale.dtype)
        return (
            None,
            image_grad if for_images else None,
            text_grad,
            scale_grad,
            *others,
        )


class RowGradient:
    """dU and, where `products`, the rows' <u_i, dU_i>: summed in float32 (float64), dU returned in the type of what it is the gradient of.

    Where that is half precision and the rows are visited only once, they are worked through in slabs: dU never exists as a whole in
    float32.
    """

    def __init__(self, rows: Side, dtype: torch.dtype, factor: Tensor, once: bool, products: bool) -> None:
        self._rows, self._how = rows, (dtype, factor, products)
        self._done: tuple[Tensor, Tensor | None] | None = None
        if once and dtype.itemsize < 4 and len(rows) > SLAB:
            self._done = (
                torch.empty_like(rows.features, dtype=dtype),
                torch.empty_like(rows.features[:, 0], dtype=torch.float64) if products else None,
            )
        else:
            rows.grad = _no_gradient(rows)

    def parts(self) -> Iterator[tuple[int, Side]]:
        """The rows to visit, with a place for their gradient, and the number of the first."""
        if self._done is None:
            yield 0, self._rows
            return
        for start in range(0, len(self._rows), SLAB):
            part = self._rows.narrow(start, start + SLAB)
            part.grad = _no_gradient(part)
            yield start, part
            for whole, piece in zip(self._done, _finished(part.features, part.grad, *self._how)):
                if whole is not None and piece is not None:
                    whole[start : start + SLAB] = piece

    def result(self) -> tuple[Tensor, Tensor | None]:
        """dU and, in float64, <u_i, dU_i> where wanted; both times the factor."""
        if self._done is not None:
            return self._done
        assert self._rows.grad is not None
        return _finished(self._rows.features, self._rows.grad, *self._how)


def _no_terms(side: Side) -> Tensor | None:
    """The log-sum-exp of nothing yet."""
    return None if side.weight is None else torch.full_like(side.weight, -torch.inf, dtype=torch.float64)


def _no_gradient(side: Side) -> Tensor:
    return widened(torch.zeros_like(side.features))


def _finished(
    features: Tensor, grad: Tensor, dtype: torch.dtype, factor: Tensor, products: bool
) -> tuple[Tensor, Tensor | None]:
    """(grad * factor in the type wanted; where `products`, <row of features, row of it> in float64). Takes over grad's memory.

    Rounding to half precision takes place where grad lies: a second copy of a million rows is what the loss means to do without.
    """
    grad.mul_(factor)
    found = row_products(features, grad) if products else None
    if dtype.itemsize >= grad.dtype.itemsize:
        return grad.to(dtype), found
    rounded = grad.view(-1).view(dtype)[: grad.numel()].view(grad.shape)
    step = max(1, SLAB // 4)
    for start in range(0, len(grad), step):  # row i goes to where row i/2 was, hence never onto one still to come
        rounded[start : start + step] = grad[start : start + step].to(dtype)
    return rounded, found


@contextlib.contextmanager
def _arithmetic(device: torch.device, loss: Loss) -> Iterator[None]:
    """Autocast off, since operands are cast already; and the asked-for precision of float32 matmuls on CUDA."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(device.type, enabled=False))
        # A module keeps the caller's setting. Half-precision numbers widened to float32 multiply exactly in TF32, too.
        if device.type == "cuda" and loss.similarity.homogeneous:
            is_half = loss.operands in (torch.float16, torch.bfloat16)
            matmul = torch.backends.cuda.matmul
            stack.callback(setattr, matmul, "fp32_precision", matmul.fp32_precision)
            matmul.fp32_precision = "tf32" if is_half else loss.fp32_precision
        yield


@contextlib.contextmanager
def _replayed(state: RandomState | None) -> Iterator[None]:
    """Random numbers as from `state` on; afterwards they go on as if none had been drawn. Tiles must come in the same order."""
    if state is None:
        yield
        return
    with RandomState.now(state.device).preserved():
        state.restore()
        yield


def _refuse_nonsense(
    total: Tensor,
    mistakes: Tensor,
    loss: Loss,
    image_features: Tensor,
    text_features: Tensor,
    scale: Tensor,
    bias: Tensor,
) -> None:
    """ValueError, on all ranks alike, for a scale that is not positive or a loss that is not finite; with the reason if it is here."""
    value, wrong_scales = torch.stack([total, mistakes]).tolist()
    if wrong_scales:
        raise ValueError(
            f"logit_scale is {float(scale):g} and must be positive: it is the multiplier itself, not its logarithm (pass log_scale.exp())"
        )
    if math.isfinite(value):
        return
    given = {"image_features": image_features, "text_features": text_features, "logit_scale": scale, "logit_bias": bias}
    reasons = [
        f"{name} has {count} non-finite numbers" for name, x in given.items() if (count := int((~x.isfinite()).sum()))
    ]
    empty = [
        int((~mask.any(1)).nonzero()[0]) for mask in loss.masks if mask is not None and not bool(mask.any(1).all())
    ]
    reasons += [f"a mask leaves sample {sample} without any token" for sample in empty]
    reason = (
        "; ".join(reasons) or "this rank's inputs are finite; either another rank's are not, or the scores overflow"
    )
    raise ValueError(f"the contrastive loss is {value}: {reason}")
