"""The Triton backend: what a block needs, put into the terms of the kernels' four functions (triton_block.py).

Letters: n rows (images), m columns (texts), D feature width.
"""

from typing import Any

import torch
from torch import Tensor

from clipscale.loss.block import Block
from clipscale.loss.objective import Objective, Sigmoid, Softmax
from clipscale.loss.similarity import product, row_products
from clipscale.loss.triton.backend import (
    add_sigmoid_gradient_block,
    add_softmax_gradient_block,
    lse_block,
    sigmoid_loss_block,
)


class TritonBackend:
    """The dot product on CUDA (or in Triton's interpreter); see TorchBackend for what the two functions have to do."""

    splits = True
    sums_scale_grad = True

    def __init__(self, objective: Objective, fp32_precision: str) -> None:
        self.objective, self.precision = objective, fp32_precision

    def merge(self, block: Block) -> None:
        rows, cols, shared = block.rows, block.cols, block.shared
        assert rows.target is not None
        if isinstance(self.objective, Sigmoid):
            total = sigmoid_loss_block(rows.features, cols.features, shared.scale, shared.bias, **self._options(block))
            rows.target[0] -= total  # which row it is put down to does not matter
            return
        wanted: dict[str, Any] = {"want_rows": rows.lse is not None, "want_cols": cols.lse is not None}
        found = lse_block(rows.features, cols.features, shared.scale, **wanted, **self._options(block))
        for side, lse in zip((rows, cols), found):
            if side.lse is not None and lse is not None:
                side.lse.copy_(torch.logaddexp(side.lse, lse))
        self._add_targets(block, self.objective)

    def add_gradients(self, block: Block) -> None:
        rows, cols, shared = block.rows, block.cols, block.shared
        options = self._options(block) | {"d_u": rows.grad, "d_v": cols.grad}
        if isinstance(self.objective, Sigmoid):
            bias_grad, scale_grad = add_sigmoid_gradient_block(
                rows.features, cols.features, shared.scale, shared.bias, **options
            )
            if shared.bias_grad is not None:
                shared.bias_grad += bias_grad
            if shared.scale_grad is not None:
                shared.scale_grad += scale_grad
            return
        epsilon = self.objective.smoothing
        options["smoothing"] = (epsilon / self.objective.total_cols, epsilon / self.objective.total_rows)
        scale_grad = add_softmax_gradient_block(
            rows.features,
            cols.features,
            shared.scale,
            rows.lse,
            cols.lse,
            rows.weight,
            cols.weight,
            epsilon=epsilon,
            **options,
        )
        if shared.scale_grad is not None:
            shared.scale_grad += scale_grad

    def _options(self, block: Block) -> dict[str, Any]:
        keys = {"row_keys": block.rows.keys, "col_keys": block.cols.keys}
        return {"positive": block.positive, "fp32_precision": self.precision, **keys}

    def _add_targets(self, block: Block, softmax: Softmax) -> None:
        """The scores that the softmax holds against the log-sum-exps: the positives', and with smoothing a share of everyone's."""
        rows, cols, target, scale = block.rows, block.cols, block.rows.target, block.shared.scale
        assert target is not None
        diagonal = block.diagonal()
        if diagonal is not None:
            i, j = diagonal
            weight = sum(side.weight[at].double() for side, at in ((rows, i), (cols, j)) if side.weight is not None)
            positives = row_products(self._seen(rows.features[i]), self._seen(cols.features[j]))
            target[i] += (1 - softmax.smoothing) * weight * scale * positives
        if not softmax.smoothing:
            return
        for side, count in ((rows, softmax.total_cols), (cols, softmax.total_rows)):
            if side.weight is None:
                continue
            # The sum of a row's scores is its product with the sum of the columns; for the texts' direction, with their weighted sum.
            weight = torch.ones_like(cols.features[:, 0]) if side is rows else side.weight
            total = product(weight[None, :], cols.features, scale.new_empty(1, cols.features.shape[1]), 1.0)
            share = scale * softmax.smoothing / count * row_products(rows.features, total.expand_as(rows.features))
            target += share * side.weight if side is rows else share

    def _seen(self, x: Tensor) -> Tensor:
        """The features as the kernels multiply them: TF32 leaves out the last 13 bits of a float32."""
        if x.dtype == torch.float32 and x.is_cuda and self.precision == "tf32":
            return (x.view(torch.int32) & -(2**13)).view(torch.float32)
        return x
