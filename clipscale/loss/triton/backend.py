"""The Triton backend of the dot product: log-sum-exps and gradients of one block, in memory linear in its rows and columns.

The forward kernels leave partial sums of a panel's tiles, which are merged in a fixed order. The backward kernels leave a panel of score
gradients, from which the GEMM library adds to both feature gradients in float32. No atomics: the same inputs give the same bits (as far
as the GEMM library does on one stream).

Letters: n rows (images), m columns (texts), D feature width. x_ij = scale <u_i, v_j>.
"""

import math
from collections.abc import Hashable
from dataclasses import replace

import torch
import triton
from torch import Tensor

from clipscale.loss.block import Block, Parameters
from clipscale.loss.machine import Machine
from clipscale.loss.objective import Direction, Objective, Sigmoid, Softmax
from clipscale.loss.similarity import product, row_products
from clipscale.loss.triton.panels import PaddedBlock, RunningSum, in_units
from clipscale.loss.triton.sigmoid import sigmoid_kernel
from clipscale.loss.triton.softmax import lse_kernel, softmax_gradient_kernel
from clipscale.loss.triton.tuning import PASSES, Tuning, arithmetic_of

WARM: set[tuple[Hashable, ...]] = set()  # what has been warmed up in this process


class TritonBackend:
    """A backend (see TorchBackend) on CUDA or in Triton's interpreter, for bfloat16, float16 and float32 features with any strides.

    Raises RuntimeError with the reason where a kernel cannot be compiled or launched.
    """

    splits_rows = True
    sums_scale_grad = True
    sums_pairs = False

    def __init__(self, objective: Objective, fp32_precision: str, tuning: Tuning, machine: Machine) -> None:
        self.objective, self.precision, self.tuning, self.machine = objective, fp32_precision, tuning, machine

    def forward(self, block: Block) -> None:
        raise NotImplementedError

    def backward(self, block: Block) -> None:
        raise NotImplementedError

    def forward_backward(self, block: Block) -> None:
        raise NotImplementedError

    def padded_width(self, features: Tensor) -> int:
        """A whole number of steps of every pass's kernels."""
        arithmetic = arithmetic_of(features.dtype, self.precision)
        depths = (self.machine.tiles(features.device, name, arithmetic).depth for name in PASSES)
        step = self.tuning.tiles.depth if self.tuning.tiles else math.lcm(*depths)
        return -(-features.shape[-1] // step) * step

    def warm_up(self, block: Block) -> None:
        """Run every kernel once on this block, one row against one column, which has the variants of any larger one."""
        rows, cols = block.rows, block.cols
        facts = [x is not None for side in (rows, cols) for x in (side.keys, side.weight, side.grad)]
        features = rows.features
        key = (features.device, features.dtype, features.shape[1], self.precision, self.tuning, self.objective, *facts)
        if key in WARM:
            return
        zero = torch.zeros((), dtype=torch.float64, device=features.device)
        rows, cols = (replace(x, lse=None if x.weight is None else x.empty_lse()) for x in (rows, cols))
        rows.target = zero.expand(1).clone()
        scale, bias = block.parameters.scale, block.parameters.bias
        block = Block(rows, cols, Parameters(scale, bias, zero.clone(), zero.clone()), 0)
        trains = rows.grad is not None or cols.grad is not None
        if not (trains and self.sums_pairs):
            self.forward(block)
        if trains:
            (self.forward_backward if self.sums_pairs else self.backward)(block)
        zero.item()  # waits for the device
        WARM.add(key)

    def padded(self, block: Block, kernel_pass: str) -> PaddedBlock:
        return PaddedBlock(block, self.precision, kernel_pass, self.tuning, self.machine)


class TritonSoftmax(TritonBackend):
    """The softmax objective."""

    objective: Softmax

    def forward(self, block: Block) -> None:
        """Log-sum-exps by the kernels, targets by the library.

        Log-sum-exps are float64: float32 would round a value near 100 by 4e-6, and with it every probability of that row. They are -inf
        where every pair is left out. One matmul unit (2 n m D FLOP) for one direction or both.
        """
        rows, cols = block.rows, block.cols
        for side, lse in zip((rows, cols), self.log_sum_exps(block)):
            if side.lse is not None and lse is not None:
                side.lse.copy_(torch.logaddexp(side.lse, lse))
        u, v, scale = rows.features, cols.features, block.parameters.scale

        def positives(diagonal: tuple[slice, slice]) -> Tensor:
            i, j = diagonal
            return scale * row_products(self._rounded(u[i]), self._rounded(v[j]))

        def smoothed(side: Direction) -> Tensor:
            # The sum of a row's scores is its product with the sum of the columns; in the texts' direction, with their weighted sum.
            is_rows = side.dim == 1
            weight = torch.ones_like(v[:, 0]) if is_rows else side.weight
            total = product(weight[None, :], v, scale.new_empty(1, v.shape[1]), 1.0)
            count = self.objective.total_cols if is_rows else self.objective.total_rows
            sums = scale * self.objective.smoothing / count * row_products(u, total.expand_as(u))
            return sums * side.weight if is_rows else sums

        to_text, to_image = self.objective.directions(block)
        self.objective.add_targets(block, to_text + to_image, positives, smoothed)

    def log_sum_exps(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        """Of this block's rows (n,) and columns (m,); None in a direction without a softmax."""
        padded = self.padded(block, "forward")
        tiles, device, machine = padded.tiles, padded.device, self.machine
        n, m = len(padded.u), len(padded.v)
        rows = None if block.rows.lse is None else RunningSum(n, device, machine)
        cols = None if block.cols.lse is None else RunningSum(m, device, machine)
        area = self.tuning.partial_bytes * tiles.rows * tiles.cols // (8 * (tiles.rows + tiles.cols))
        height, width = padded.panel_shape(area)
        row_size = 0 if rows is None else triton.cdiv(width, tiles.cols) * height
        col_size = 0 if cols is None else triton.cdiv(height, tiles.rows) * width
        row_parts, col_parts = ([torch.empty(size, device=device) for _ in range(2)] for size in (row_size, col_size))
        for panel in padded.panels(height, width):
            padded.launch(
                lse_kernel, panel, panel.u, panel.v, padded.factor, *panel.keys, *row_parts, *col_parts, *panel.sizes,
                panel.positive, ROWS=rows is not None, COLS=cols is not None,
            )  # fmt: skip
            if rows is not None:
                rows.merge(panel.rows, triton.cdiv(len(panel.v), tiles.cols), *row_parts)
            if cols is not None:
                cols.merge(panel.cols, triton.cdiv(len(panel.u), tiles.rows), *col_parts)
        return None if rows is None else rows.log(padded.units), None if cols is None else cols.log(padded.units)

    def backward(self, block: Block) -> None:
        """Add scale * G V to the rows' gradient, scale * G' U to the columns', and sum_ij G_ij <u_i, v_j> to the scale's.

            G_ij = a_i exp(x_ij - r_i) + b_j exp(x_ij - c_j) - a_i e / M - b_j e / N - (1 - e) (a_i + b_j) [j positive of i]

        and 0 for a pair left out, with r, c the complete log-sum-exps, a, b the weights, and label smoothing e over N rows and M columns
        in all. One matmul unit for the scores and one for each side that needs its gradient.
        """
        rows, cols, scale, e = block.rows, block.cols, block.parameters.scale, self.objective.smoothing
        constants = (e / self.objective.total_cols, e / self.objective.total_rows)
        padded = self.padded(block, "backward")
        row_terms = in_units(rows.lse, rows.weight, padded.units)
        col_terms = in_units(cols.lse, cols.weight, padded.units)
        store = rows.grad is not None or cols.grad is not None
        scores = padded.score_gradients()
        total = torch.zeros((), dtype=torch.float64, device=padded.device)
        bound = scale * sum(side.weight.abs().amax() for side in (rows, cols) if side.weight is not None)
        with padded.accumulating(bound, rows.grad, cols.grad) as gradient_scale:
            for panel in padded.panels(*scores.shape):
                r, row_corrected, a = (None if x is None else x[panel.rows] for x in row_terms)
                c, col_corrected, b = (None if x is None else x[panel.cols] for x in col_terms)
                sums = torch.empty(padded.grid(panel), device=padded.device)
                padded.launch(
                    softmax_gradient_kernel, panel, panel.u, panel.v, padded.factor, gradient_scale, r, c,
                    row_corrected, col_corrected, a, b, *panel.keys, scores, sums, *panel.sizes, scores.stride(0),
                    panel.positive, 1.0 - e, *constants,
                    ROWS=r is not None, COLS=c is not None, SMOOTH=e > 0, STORE=store,
                )  # fmt: skip
                padded.add_products(panel, scores, rows.grad, cols.grad)
                total += sums.sum(dtype=torch.float64)
            if block.parameters.scale_grad is not None:
                block.parameters.scale_grad += total / gradient_scale.double()

    def _rounded(self, x: Tensor) -> Tensor:
        """The features as the kernels multiply them: TF32 drops the last 13 bits of a float32."""
        if x.dtype == torch.float32 and x.is_cuda and self.precision == "tf32":
            return (x.view(torch.int32) & -(2**13)).view(torch.float32)
        return x


class TritonSigmoid(TritonBackend):
    """The sigmoid objective."""

    sums_pairs = True

    def forward(self, block: Block) -> None:
        """Subtract the sum over the pairs that count of softplus(-z_ij (x_ij + bias)) from the target of row 0: any row would do.

        z = 1 at positives and -1 elsewhere. Tiles are summed in float32, their sums in float64.
        """
        self._sweep(block, value=True, gradient=False)

    def backward(self, block: Block) -> None:
        """Add scale * G V to the rows' gradient, scale * G' U to the columns', sum_ij G_ij to the bias's and sum_ij G_ij <u_i, v_j>
        to the scale's.

        G_ij = sigmoid(x_ij + bias), at positives -sigmoid(-(x_ij + bias)), 0 for a pair left out.
        """
        self._sweep(block, value=False, gradient=True)

    def forward_backward(self, block: Block) -> None:
        """Both, from one product of the features."""
        self._sweep(block, value=True, gradient=True)

    def _sweep(self, block: Block, value: bool, gradient: bool) -> None:
        rows, cols, parameters = block.rows, block.cols, block.parameters
        padded = self.padded(block, "sigmoid")
        store = gradient and (rows.grad is not None or cols.grad is not None)
        area = self.tuning.partial_bytes // 4 * padded.tiles.rows * padded.tiles.cols
        scores = padded.score_gradients() if gradient else torch.empty(0, 0, device=padded.device)
        totals = torch.zeros(3, dtype=torch.float64, device=padded.device)
        with padded.accumulating(parameters.scale, rows.grad, cols.grad) as gradient_scale:
            for panel in padded.panels(*(scores.shape if gradient else padded.panel_shape(area))):
                sums = torch.zeros(3, padded.grid(panel), device=padded.device)
                padded.launch(
                    sigmoid_kernel, panel, panel.u, panel.v, parameters.scale, parameters.bias, gradient_scale,
                    *panel.keys, scores, *sums, *panel.sizes, scores.stride(0), panel.positive,
                    VALUE=value, GRADIENT=gradient, STORE=store,
                )  # fmt: skip
                if store:
                    padded.add_products(panel, scores, rows.grad, cols.grad)
                totals += sums.sum(1, dtype=torch.float64)
        assert block.rows.target is not None or not value
        if block.rows.target is not None and value:
            block.rows.target[0] -= totals[0]
        for grad, total in zip((parameters.bias_grad, parameters.scale_grad), totals[1:]):
            if grad is not None:
                grad += total


def triton_backend(
    objective: Objective, fp32_precision: str, tuning: Tuning, machine: Machine
) -> TritonSoftmax | TritonSigmoid:
    """The backend with the kernels of an objective."""
    if isinstance(objective, Sigmoid):
        return TritonSigmoid(objective, fp32_precision, tuning, machine)
    return TritonSoftmax(objective, fp32_precision, tuning, machine)
