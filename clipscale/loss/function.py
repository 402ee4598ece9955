"""The loss as one differentiable function: an exchange's sweep, once per pass, over a backend's two block functions.

Letters: n rows (images) and m columns (texts) that this rank brings, N rows of all ranks, D feature width.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipscale.loss.block import Block, Shared, Side
from clipscale.loss.exchange import Single
from clipscale.loss.similarity import Similarity, widened


class Backend(Protocol):
    """What works on a block; see TorchBackend."""

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
    row_extras: dict[str, Tensor | None]  # mask and keys of the images
    col_extras: dict[str, Tensor | None]  # and of the texts
    fp32_precision: str  # of float32 matmuls on CUDA: "ieee" or "tf32"
    check: bool  # look at the result, which costs a synchronisation, and explain a loss that is not finite

    def own_sides(self, image_features: Tensor, text_features: Tensor) -> tuple[Side, Side]:
        """This rank's rows and columns."""
        rows = Side(image_features.detach().to(self.operands).contiguous(), **self.row_extras)
        cols = Side(text_features.detach().to(self.operands).contiguous(), **self.col_extras)
        for side, weight in zip((rows, cols), self.weights):
            if weight is not None:
                dtype = widened(side.features[:0]).dtype
                side.weight = torch.full((len(side),), weight, dtype=dtype, device=side.features.device)
                side.weight[len(rows) :] = 0  # a hard negative is nobody's positive
        return rows, cols


class ContrastiveLoss(torch.autograd.Function):
    """(loss, image features, text features, scale, bias, *parameters of the similarity) -> the mean over all rows of all ranks.

    The forward pass takes one matmul unit and keeps the log-sum-exps; the backward pass takes three, fewer where an input is frozen.
    Gradients are shares: their sum over the ranks is the gradient of the mean.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Loss, image_features: Tensor, text_features: Tensor, scale: Tensor, bias: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(image_features, text_features, scale, bias, *parameters)
        device, exchange = image_features.device, loss.exchange
        ctx.loss, ctx.random = loss, None if loss.similarity.homogeneous else _random_state(device)
        shared = Shared(scale, bias, parameters)
        with _arithmetic(device, loss):
            rows, cols = exchange.spread(*loss.own_sides(image_features, text_features))
            rows.lse, rows.target = _no_terms(rows), scale.new_zeros(len(rows), dtype=torch.float64)
            cols.lse = exchange.sweep(cols, "lse", _no_terms, lambda cols, at: loss.backend.merge(Block(rows, cols, shared, at)))
            per_row = -rows.target
            for side in (rows, cols):
                if side.lse is not None and side.weight is not None:
                    side.lse.masked_fill_(side.lse == -torch.inf, 0)  # a hard negative whose every pair was left out
                    per_row += (side.weight * side.lse)[: len(rows)]
            total = exchange.own(per_row).sum()
            total, mistakes = exchange.total(torch.stack([total, (scale <= 0).double()])).unbind()
        ctx.rows, ctx.cols, ctx.count = replace(rows, target=None), cols, len(image_features) * exchange.size
        if loss.check:
            _refuse_nonsense(total, mistakes, loss, image_features, text_features, scale, bias)
        return (total / ctx.count).to(scale.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        image_features, text_features, scale, bias, *parameters = ctx.saved_tensors  # raises if one was changed in place
        loss: Loss = ctx.loss
        exchange, homogeneous = loss.exchange, loss.similarity.homogeneous
        _, for_images, for_texts, for_scale, for_bias, *for_parameters = ctx.needs_input_grad
        zeros = torch.zeros_like
        shared = Shared(
            scale,
            bias,
            tuple(parameters),
            scale_grad=zeros(scale) if for_scale and not homogeneous else None,
            bias_grad=zeros(bias) if for_bias else None,
            parameter_grads=tuple(zeros(p, dtype=scale.dtype) if wanted else None for p, wanted in zip(parameters, for_parameters)),
        )

        def no_gradient(side: Side) -> Tensor:
            return zeros(side.features, dtype=scale.dtype)

        # The scale's gradient follows from one side's: take the images', unless only the texts' is computed anyway.
        through_images = for_images or (for_scale and homogeneous and not for_texts)
        rows, cols = replace(ctx.rows, grad=no_gradient(ctx.rows) if through_images else None), ctx.cols
        with _arithmetic(image_features.device, loss), _replayed(ctx.random):
            cols_grad = exchange.sweep(
                cols,
                "grad",
                lambda cols: no_gradient(cols) if for_texts else None,
                lambda cols, at: loss.backend.add_gradients(Block(rows, cols, shared, at)),
            )
        factor = grad_output / ctx.count
        rows_grad = None if rows.grad is None else exchange.own(rows.grad).mul_(factor)
        cols_grad = None if cols_grad is None else exchange.own_cols(cols_grad).mul_(factor)
        scale_grad = None
        if for_scale and homogeneous:
            side, grad = (image_features, rows_grad) if rows_grad is not None else (text_features, cols_grad)
            scale_grad = _inner_product(side, grad, loss.operands) / scale
        elif shared.scale_grad is not None:
            scale_grad = shared.scale_grad * (factor * exchange.share)
        return (
            None,
            rows_grad.to(image_features.dtype) if for_images and rows_grad is not None else None,
            cols_grad.to(text_features.dtype) if cols_grad is not None else None,
            None if scale_grad is None else scale_grad.to(scale.dtype),
            *(
                None if grad is None else (grad * (factor * exchange.share)).to(x.dtype)
                for x, grad in ((bias, shared.bias_grad), *zip(parameters, shared.parameter_grads))
            ),
        )


def _no_terms(side: Side) -> Tensor | None:
    """The log-sum-exp of nothing yet."""
    return None if side.weight is None else torch.full_like(side.weight, -torch.inf, dtype=torch.float64)


def _inner_product(features: Tensor, grad: Tensor, operands: torch.dtype) -> Tensor:
    """sum_i <u_i, dU_i>, in slabs, since a product of the features' size would double the memory."""
    parts = zip(features.split(8192), grad.split(8192))
    return sum(((u.to(operands) * d).sum(dtype=torch.float64) for u, d in parts), start=grad.new_zeros((), dtype=torch.float64))


@contextlib.contextmanager
def _arithmetic(device: torch.device, loss: Loss) -> Iterator[None]:
    """Autocast off, since operands are cast already; and the asked-for precision of float32 matmuls on CUDA.

    Half-precision numbers that were widened to float32 multiply exactly in TF32 too.
    """
    if device.type != "cuda":
        with torch.autocast(device.type, enabled=False):
            yield
        return
    half = loss.operands in (torch.float16, torch.bfloat16)
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, "tf32" if half else loss.fp32_precision
    try:
        with torch.autocast("cuda", enabled=False):
            yield
    finally:
        settings.fp32_precision = before


def _random_state(device: torch.device) -> tuple[torch.device, Tensor, Tensor | None]:
    return device, torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextlib.contextmanager
def _replayed(state: tuple[torch.device, Tensor, Tensor | None] | None) -> Iterator[None]:
    """Random numbers as they were at `state`; afterwards they go on as if nothing had been drawn. Needs the same order of tiles."""
    if state is None:
        yield
        return
    device, cpu, cuda = state
    with torch.random.fork_rng([device] if cuda is not None else []):
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        yield


def _refuse_nonsense(
    total: Tensor, mistakes: Tensor, loss: Loss, image_features: Tensor, text_features: Tensor, scale: Tensor, bias: Tensor
) -> None:
    """ValueError, on all ranks alike, for a scale that is not positive or a loss that is not finite, with the reason where it is found here."""
    value, wrong_scales = torch.stack([total, mistakes]).tolist()
    if wrong_scales:
        raise ValueError(
            f"logit_scale is {float(scale):g} and must be positive: it is the multiplier itself, not its logarithm (pass log_scale.exp())"
        )
    if value - value == 0:  # neither infinite nor NaN
        return
    reasons = [
        f"{name} holds {int((~x.isfinite()).sum())} non-finite numbers"
        for name, x in (("image_features", image_features), ("text_features", text_features), ("logit_scale", scale), ("logit_bias", bias))
        if not bool(x.isfinite().all())
    ]
    for name, mask in (("image_mask", loss.row_extras["mask"]), ("text_mask", loss.col_extras["mask"])):
        if mask is not None and not bool(mask.any(1).all()):
            reasons.append(f"{name} leaves a sample without any token")
    where = "; ".join(reasons) or "the inputs of this rank are finite, so the cause is another rank's, or scores too large for the precision"
    raise ValueError(f"the contrastive loss is {value}: {where}")
