"""The loss as one differentiable function: each pass is an exchange's sweep over one of a backend's two block functions.

Letters: n rows (images) and m columns (texts) of this rank, N rows of all ranks, D feature width.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipscale.loss.block import Block, Parameters, RowBlock, widened
from clipscale.loss.exchange import Single
from clipscale.loss.inputs import Extras
from clipscale.loss.machine import float32_matmuls
from clipscale.loss.similarity import Similarity, row_products
from clipscale.rng import RandomState

SLAB = (
    2**14
)  # rows whose float32 gradient exists at a time, where it is then rounded to half precision: the height of a panel
# Float32 sums of columns beyond those that fit into the result's own memory. With panels of 512 MiB the loss of 2^20 pairs then takes
# under 1.9 GiB beyond features and gradients up to D = 1280. From D = 641 on some columns need a second pass over their scores: 8 % of
# them at D = 768 and 25 % at D = 1280, which is 2 % and 6 % of the matmuls.
SPARE_BYTES = 5 << 28
GRAIN = 2**12  # columns at which a gradient is split: whole tiles of every backend


class Backend(Protocol):
    """The two functions of a block; TorchBackend says what they do."""

    splits_rows: bool  # whether a block's rows may be given in several parts
    sums_scale_grad: (
        bool  # does backward sum the scale's gradient; otherwise scale dL/dscale = sum_i <u_i, dU_i> gives it
    )

    def padded_width(self, features: Tensor) -> int:
        """The width that the features are padded to with zeros, once, before they meet: at least their own."""

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
        """This rank's rows and columns, with their weights, as the backend takes them."""
        rows, cols = self.extras.blocks(image_features, text_features)
        for side in (rows, cols):
            missing = self.backend.padded_width(side.features) - side.features.shape[-1]
            side.features = F.pad(side.features, (0, missing)) if missing else side.features
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
            if exchange.failure is not None:
                per_row.fill_(torch.nan)
            bad_scale = (scale <= 0).double()
            total, bad_scales = exchange.total(torch.stack([exchange.own_rows(per_row).sum(), bad_scale])).unbind()

        if exchange.failure is not None and not call.check:
            raise exchange.failure
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
        rounding = Rounding(grad_output / ctx.count, from_rows)
        images = texts = None
        if needs_images or (from_rows and not needs_texts):
            images = _row_gradient(rows, image_features, rounding, call)
        if needs_texts and exchange.size == 1 and _is_large(cols, text_features, call):
            texts = SplitGradient(cols, text_features, rounding, SPARE_BYTES)

        def visit(cols: RowBlock, positive: int | None) -> None:
            for row, row_part in images.parts() if images else [(0, rows)]:
                for col, col_part in texts.parts() if texts else [(0, cols)]:
                    offset = None if positive is None else positive + row - col
                    call.backend.backward(Block(row_part, col_part, parameters, offset))
            # The scores of these once more, for their gradient alone.
            for col, col_part in texts.later_parts() if texts else []:
                call.backend.backward(Block(replace(rows, grad=None), col_part, Parameters(scale, bias), -col))

        with _arithmetic(image_features.device, call), _replayed(ctx.random):
            text_sums = exchange.backward(cols, visit, needs_texts and texts is None)
            if exchange.failure is not None:
                raise exchange.failure
            image_grad = text_grad = products = text_products = None
            if images:
                image_grad, products = (None if x is None else exchange.own_rows(x) for x in images.result())
            if texts:
                text_grad, text_products = texts.result()
            elif text_sums is not None:
                own = exchange.own_cols(cols.features), exchange.own_cols(text_sums)
                text_grad, text_products = rounding.finished(*own, text_features)
            products = text_products if products is None else products
        replicated = (
            (scale, parameters.scale_grad),
            (bias, parameters.bias_grad),
            *zip(module_parameters, parameters.module_grads),
        )
        scale_grad, *others = (
            None if grad is None else (grad * rounding.factor * exchange.local_fraction).to(x.dtype)
            for x, grad in replicated
        )
        if products is not None:
            scale_grad = (products.sum() / scale).to(scale.dtype)
        return None, image_grad if needs_images else None, text_grad, scale_grad, *others


@dataclass
class Rounding:
    """How float32 (float64) sums become a gradient: times `factor`, then rounded."""

    factor: Tensor
    needs_products: bool  # whether <u_i, dU_i> is needed for each row

    def finished(self, features: Tensor, sums: Tensor, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """(the gradient, with the type and the width of `like`; its products with the features in float64). Overwrites the sums."""
        sums.mul_(self.factor)
        products = row_products(features, sums) if self.needs_products else None
        return _unpadded(sums, like).to(like.dtype).contiguous(), products


class WholeGradient:
    """The gradient of a side, with the sums of all rows at once.

    `like` are the caller's features: they have the gradient's type, and no padding.
    """

    def __init__(self, side: RowBlock, like: Tensor, rounding: Rounding) -> None:
        self.side, self.like, self.rounding = side, like, rounding
        side.grad = side.empty_grad()

    def parts(self) -> Iterator[tuple[int, RowBlock]]:
        """The index of the first row, and rows with a place for their sums; again for every visit."""
        yield 0, self.side

    def result(self) -> tuple[Tensor, Tensor | None]:
        """The gradient, and with `rounding.needs_products` its products with the features."""
        assert self.side.grad is not None
        return self.rounding.finished(self.side.features, self.side.grad, self.like)


class SlabGradient(WholeGradient):
    """The same in half precision, for rows that are visited once: SLAB rows at a time have float32 sums."""

    def __init__(self, side: RowBlock, like: Tensor, rounding: Rounding) -> None:
        self.side, self.like, self.rounding = side, like, rounding
        self.grad = torch.empty_like(
            _unpadded(side.features, like), dtype=like.dtype, memory_format=torch.contiguous_format
        )
        self.products = side.features.new_empty(len(side), dtype=torch.float64) if rounding.needs_products else None

    def parts(self) -> Iterator[tuple[int, RowBlock]]:
        for start in range(0, len(self.side), SLAB):
            part = self.side[start : start + SLAB]
            part.grad = part.empty_grad()
            yield start, part
            self.finish(start, part.features, part.grad)

    def finish(self, start: int, features: Tensor, sums: Tensor) -> None:
        """Write the sums of the rows from `start` on into the result."""
        for i in range(0, len(sums), SLAB // 4):  # of which a copy in half precision exists at a time
            u, x = features[i : i + SLAB // 4], sums[i : i + SLAB // 4]
            here = slice(start + i, start + i + len(x))
            self.grad[here], products = self.rounding.finished(u, x, self.like)
            if self.products is not None and products is not None:
                self.products[here] = products

    def result(self) -> tuple[Tensor, Tensor | None]:
        return self.grad, self.products


class SplitGradient(SlabGradient):
    """The same for rows that are visited several times, or for columns.

    The sums of the first half (of fewer rows where features are padded) are in the memory of the result. Row i is rounded to where row
    i/2 was, never over a later row. The sums of the other rows have their own memory, at most `spare_bytes` of it. Rows beyond that,
    `later_parts`, are visited once more: the first visits leave their gradient out.
    """

    def __init__(self, side: RowBlock, like: Tensor, rounding: Rounding, spare_bytes: int | None = None) -> None:
        super().__init__(side, like, rounding)
        self.is_finished = False
        n, row_size = len(side), side.features[0].numel()
        self.half = self.grad.numel() // (2 * row_size) // GRAIN * GRAIN
        self.spare = n - self.half
        if spare_bytes is not None:
            self.spare = min(self.spare, max(1, spare_bytes // (4 * row_size) // GRAIN) * GRAIN)
        in_result = self.grad.view(-1)[: 2 * self.half * row_size].view(torch.float32)
        self.sums = (
            in_result.view(self.half, *side.features.shape[1:]).zero_(),
            torch.zeros_like(side.features[: self.spare], dtype=torch.float32),
        )

    def parts(self) -> Iterator[tuple[int, RowBlock]]:
        end = self.half + self.spare
        for start, stop, sums in ((0, self.half, self.sums[0]), (self.half, end, self.sums[1])):
            yield start, replace(self.side[start:stop], grad=sums)
        if end < len(self.side):
            yield end, self.side[end:]

    def later_parts(self) -> Iterator[tuple[int, RowBlock]]:
        """The rows that `parts` gave without a place for their sums."""
        self._finish_first()
        for start in range(self.half + self.spare, len(self.side), self.spare):
            part = self.side[start : start + self.spare]
            part.grad = self.sums[1][: len(part)].zero_()
            yield start, part
            self.finish(start, part.features, part.grad)

    def _finish_first(self) -> None:
        for start, sums in zip((0, self.half), self.sums):
            self.finish(start, self.side.features[start : start + len(sums)], sums)
        self.is_finished = True

    def result(self) -> tuple[Tensor, Tensor | None]:
        if not self.is_finished:
            self._finish_first()
        return super().result()


def _unpadded(x: Tensor, like: Tensor) -> Tensor:
    return x[..., : like.shape[-1]] if like.dim() > 1 else x


def _is_large(side: RowBlock, like: Tensor, call: LossCall) -> bool:
    """Whether a gradient is too large for a second copy of it in float32."""
    return like.dtype.itemsize < 4 and len(side) > SLAB and call.backend.splits_rows


def _row_gradient(rows: RowBlock, like: Tensor, rounding: Rounding, call: LossCall) -> WholeGradient:
    if not _is_large(rows, like, call):
        return WholeGradient(rows, like, rounding)
    return (SlabGradient if call.exchange.visits == 1 else SplitGradient)(rows, like, rounding)


@contextlib.contextmanager
def _arithmetic(device: torch.device, call: LossCall) -> Iterator[None]:
    """Autocast off, since features are cast already, and the requested precision of float32 matmuls on CUDA."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(device.type, enabled=False))
        # A module keeps the caller's setting. Half-precision numbers widened to float32 multiply exactly in TF32, too.
        if device.type == "cuda" and call.similarity.homogeneous:
            is_half = call.extras.dtype in (torch.float16, torch.bfloat16)
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


def _refuse_bad_result(
    total: Tensor,
    bad_scales: Tensor,
    call: LossCall,
    image_features: Tensor,
    text_features: Tensor,
    scale: Tensor,
    bias: Tensor,
) -> None:
    """ValueError, on all ranks alike, for a scale that is not positive or a loss that is not finite, with the reason if it is here.

    This rank's own failure, or RuntimeError where another rank has failed.
    """
    value, wrong = torch.stack([total, bad_scales]).tolist()
    if wrong:
        raise ValueError(
            f"logit_scale is {float(scale):g} and must be positive: it is the multiplier itself, not its logarithm (pass log_scale.exp())"
        )
    if math.isfinite(value):
        return
    failed = call.exchange.failures()
    if call.exchange.failure is not None:
        raise call.exchange.failure
    if failed:
        raise RuntimeError("contrastive_loss failed on " + "; ".join(failed))
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
