"""The Triton backend of the dot product: log-sum-exps and gradients of a block, in memory linear in its sides.

A block is cut into panels: rectangles of whole tiles and bounded area. The forward kernel leaves partial sums of a
panel's tiles, which a second one adds in a fixed order. The backward kernel leaves a panel of score gradients, from
which the GEMM library adds to both feature gradients in float32. No atomics: the same inputs give the same bits (as far
as the GEMM library does on one stream).

Letters: n rows (images), m columns (texts), D feature width. x_ij = scale <u_i, v_j>.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from clipscale.loss.block import Block, RowBlock
from clipscale.loss.machine import Machine
from clipscale.loss.objective import Objective, Sigmoid, Softmax
from clipscale.loss.similarity import row_products
from clipscale.loss.triton.sigmoid import sigmoid_kernel
from clipscale.loss.triton.softmax import lse_kernel, merge_kernel, softmax_gradient_kernel
from clipscale.loss.triton.tiles import UNIT
from clipscale.loss.triton.tuning import WIDTH_STEP

MERGED = 128  # rows or columns of a program of merge_kernel


class TritonBackend:
    """A backend (see TorchBackend) on CUDA or in Triton's interpreter, for bfloat16, float16 and float32 features."""

    width_step = WIDTH_STEP
    sums_scale_grad = True
    other_lses = 0

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def missing_factor(self, scale: Tensor) -> Tensor:
        """Score gradients are stored times UNIT and without the scale."""
        return scale / UNIT.value

    def launch(self, kernel: Any, panel: Block, *given: Any, store: Tensor | None = None) -> None:
        """Run a program of the kernel for each tile of the panel, with the operands in front of what is given.

        `store` is where the kernel stores a panel; it is given first, after the positives' place and with its stride.
        """
        u, v = panel.rows.features, panel.cols.features
        t = self.machine.tiles(u.device, u.dtype)
        if u.dtype == torch.bfloat16 and u.device.type == "cpu":
            u, v = u.float(), v.float()  # the interpreter multiplies bfloat16 by its bits
        tma = self.machine.has_descriptors(u)

        def described(x: Tensor, height: int, width: int) -> Any:
            return TensorDescriptor.from_tensor(x, [height, width]) if tma else x

        # Without a positive, one past the end: no row reaches it.
        positive = len(v) if panel.positive is None else panel.positive
        stored = () if store is None else (positive, described(store, t.rows, t.cols // 4), store.stride(0))
        self.machine.launch(
            kernel, programs(panel, t.rows, t.cols), u.device,
            described(u, t.rows, t.depth), described(v, t.cols, t.depth), panel.parameters.scale,
            len(u), len(v), u.shape[1], u.stride(0), v.stride(0),
            *stored, *given, TMA=tma, BM=t.rows, BN=t.cols, BK=t.depth, num_warps=t.warps, num_stages=t.stages,
            maxnreg=t.registers, enable_fp_fusion=True,
        )  # fmt: skip

    def panels(self, block: Block, area: int) -> Iterator[Block]:
        """The block in about equal panels of whole tiles, of at most about `area`, as square as the block allows."""
        t = self.machine.tiles(block.rows.features.device, block.rows.features.dtype)
        n, m = len(block.rows), len(block.cols)
        height = _even(n, min(n, max(math.isqrt(area), area // m, 1)), t.rows)
        width = _even(m, min(m, max(area // height, 1)), t.cols)
        corners = ((i, j) for i in range(0, n, height) for j in range(0, m, width))
        return self.machine.parts(block.tile(i, height, j, width) for i, j in corners)

    def gradient_panels(self, block: Block) -> Iterator[tuple[Block, Tensor]]:
        """Panels with memory for score gradients; what the caller stores there joins the feature gradients."""
        features, store = block.rows.features, None
        t = self.machine.tiles(features.device, features.dtype)
        for panel in self.panels(block, self.machine.panel_bytes // features.itemsize):
            n, m = len(panel.rows), len(panel.cols)
            if store is None:  # the first panel is the largest
                store = features.new_empty(triton.cdiv(n, t.rows) * t.rows, triton.cdiv(m, t.cols) * t.cols)
            yield panel, store
            g_nm = store[:n, :m]
            if panel.rows.grad is not None:
                self.machine.add_product(panel.rows.grad, g_nm, panel.cols.features)
            if panel.cols.grad is not None:
                self.machine.add_product(panel.cols.grad, g_nm.T, panel.rows.features)


class TritonSoftmax(TritonBackend):
    """The softmax objective: one matmul unit (2 n m D FLOP) in the forward pass, three in the backward pass."""

    sums_pairs = False

    def __init__(self, objective: Softmax, machine: Machine) -> None:
        super().__init__(machine)
        self.objective = objective

    def forward(self, block: Block) -> None:
        """Log-sum-exps by the kernels, targets by the library."""
        features, scale, diagonal = block.rows.features, block.parameters.scale, block.diagonal()
        t = self.machine.tiles(features.device, features.dtype)
        # Four numbers of four bytes a tile row and a tile column.
        for panel in self.panels(block, self.machine.partial_bytes // 8 * t.rows * t.cols // (t.rows + t.cols)):
            n, m = len(panel.rows), len(panel.cols)
            row_parts = torch.empty(2, triton.cdiv(m, t.cols), n, device=features.device)
            col_parts = torch.empty(2, triton.cdiv(n, t.rows), m, device=features.device)
            self.launch(lse_kernel, panel, row_parts, col_parts)
            for side, parts in ((panel.rows, row_parts), (panel.cols, col_parts)):
                if side.lse is not None:
                    _, lines, size = parts.shape
                    count = triton.cdiv(size, MERGED)
                    self.machine.launch(
                        merge_kernel, count, features.device, parts, scale, side.lse, size, lines, BLOCK=MERGED
                    )
        if diagonal is not None:
            i, j = diagonal
            positives = scale * row_products(features[i], block.cols.features[j])
            self.objective.add_positives(positives, self.objective.directions(block), block, diagonal)

    def backward(self, block: Block) -> None:
        """Add UNIT * G V to the rows' gradient, UNIT * G' U to the columns', sum_ij G_ij <u_i, v_j> to the scale's."""
        t = self.machine.tiles(block.rows.features.device, block.rows.features.dtype)
        for panel, store in self.gradient_panels(block):
            products = store.new_empty(programs(panel, t.rows, t.cols), dtype=torch.float32)
            (row_lse, row_weight), (col_lse, col_weight) = _lse_and_weight(panel.rows), _lse_and_weight(panel.cols)
            self.launch(softmax_gradient_kernel, panel, row_lse, col_lse, row_weight, col_weight, products, store=store)
            if block.parameters.scale_grad is not None:
                block.parameters.scale_grad += products.sum(dtype=torch.float64) / UNIT.value


class TritonSigmoid(TritonBackend):
    """The sigmoid objective: three matmul units for value and gradients, in one sweep."""

    sums_pairs = True

    def forward(self, block: Block) -> None:
        """Subtract sum_ij softplus(-z_ij (x_ij + bias)), z = 1 at positives, else -1, from the target of row 0."""
        self.backward(block)

    def backward(self, block: Block) -> None:
        """The same, where there are targets; and add UNIT * G V to the rows' gradient, UNIT * G' U to the columns',
        sum_ij G_ij to the bias's and sum_ij G_ij <u_i, v_j> to the scale's, where these are wanted."""
        parameters, target = block.parameters, block.rows.target
        t = self.machine.tiles(block.rows.features.device, block.rows.features.dtype)
        for panel, store in self.gradient_panels(block):
            sums = store.new_empty(3, programs(panel, t.rows, t.cols), dtype=torch.float32)
            self.launch(sigmoid_kernel, panel, parameters.bias, sums, store=store)
            value, bias_grad, scale_grad = sums.sum(1, dtype=torch.float64).unbind()
            if target is not None:
                target[0] -= value
            if parameters.bias_grad is not None:
                parameters.bias_grad += bias_grad / UNIT.value
            if parameters.scale_grad is not None:
                parameters.scale_grad += scale_grad / UNIT.value


def triton_backend(objective: Objective, machine: Machine) -> TritonSoftmax | TritonSigmoid:
    """The backend with the kernels of an objective."""
    return TritonSigmoid(machine) if isinstance(objective, Sigmoid) else TritonSoftmax(objective, machine)


def programs(panel: Block, rows: int, cols: int) -> int:
    """The number of tiles."""
    return triton.cdiv(len(panel.rows), rows) * triton.cdiv(len(panel.cols), cols)


def _lse_and_weight(side: RowBlock) -> tuple[Tensor, Tensor]:
    """Of a direction without a softmax: no probabilities."""
    if side.weight is None or side.lse is None:
        features = side.features
        lse = features.new_full((len(side),), torch.inf, dtype=torch.float64)
        return lse, torch.zeros_like(lse, dtype=torch.float32)
    return side.lse, side.weight


def _even(size: int, most: int, tile: int) -> int:
    """Size of each of the fewest about equal parts of at most `most` (rounded up to whole tiles)."""
    return triton.cdiv(triton.cdiv(size, triton.cdiv(size, most)), tile) * tile
