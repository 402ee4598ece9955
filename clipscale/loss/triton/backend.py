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

from clipscale.loss.block import Block
from clipscale.loss.runtime import LossRuntime
from clipscale.loss.triton.tiles import GRAD_SCALE
from clipscale.loss.triton.tuning import TileShape


class TritonBackend:
    """A backend (see TorchBackend) on CUDA or in Triton's interpreter, for bfloat16, float16 and float32 features
    without keys. Their width is a multiple of WIDTH_STEP. Each objective with kernels has a subclass."""

    def __init__(self, runtime: LossRuntime, tiles: TileShape) -> None:
        self.runtime = runtime
        self.tiles = tiles

    def forward(self, block: Block) -> None:
        """See TorchBackend. A pairwise objective has none: `backward` is its one sweep."""
        raise NotImplementedError

    def backward(self, block: Block) -> None:
        """See TorchBackend."""
        raise NotImplementedError

    def programs(self, panel: Block) -> int:
        """The number of tiles."""
        return triton.cdiv(len(panel.rows), self.tiles.rows) * triton.cdiv(len(panel.cols), self.tiles.cols)

    def launch(
        self, kernel: Any, panel: Block, scale: Tensor, panel_buffer: Tensor | None = None, **arguments: object
    ) -> None:
        """Run a program of the kernel for each tile of the panel, with the operands and these `arguments`.

        `scale` is 0-d. `panel_buffer` is where a gradient kernel stores a panel; such a kernel also gets the positives'
        column.
        """
        u = panel.rows.features
        v = panel.cols.features
        t = self.tiles
        if u.dtype == torch.bfloat16 and u.device.type == "cpu":
            u = u.float()  # the interpreter multiplies bfloat16 by its bits
            v = v.float()
        tma = self.runtime.has_descriptors(u)

        def as_operand(x: Tensor, height: int, width: int) -> object:
            return TensorDescriptor.from_tensor(x, [height, width]) if tma else x

        if panel_buffer is not None:
            arguments |= {
                "panel": as_operand(panel_buffer, t.rows, t.cols // 4),
                "stride_panel": panel_buffer.stride(0),
            }
            # Without a positive it is one past the end, which no row reaches.
            arguments["positive_offset"] = len(v) if panel.positive_offset is None else panel.positive_offset
        self.runtime.launch(
            kernel, self.programs(panel), u.device,
            as_operand(u, t.rows, t.depth), as_operand(v, t.cols, t.depth), scale,
            len(u), len(v), u.shape[1], u.stride(0), v.stride(0),
            **arguments, TMA=tma, BM=t.rows, BN=t.cols, BK=t.depth, num_warps=t.warps, num_stages=t.stages,
            maxnreg=t.registers, enable_fp_fusion=True,
        )  # fmt: skip

    def panels(self, block: Block, area: int) -> Iterator[Block]:
        """The block in about equal panels of whole tiles, of at most about `area`, as square as the block allows."""
        t = self.tiles
        n = len(block.rows)
        m = len(block.cols)
        height = _even_size(n, min(n, max(math.isqrt(area), area // m, 1)), t.rows)
        width = _even_size(m, min(m, max(area // height, 1)), t.cols)
        return self.runtime.tiles_to_run(block.split(height, width))

    def gradient_panels(self, block: Block) -> Iterator[tuple[Block, Tensor]]:
        """Panels with memory for score gradients. What the caller stores there is multiplied into the feature
        gradients."""
        features = block.rows.features
        panel_buffer = None
        factor = block.parameters.scale_number / GRAD_SCALE.value  # the panel holds GRAD_SCALE * G
        t = self.tiles
        for panel in self.panels(block, t.panel_bytes // features.itemsize):
            n = len(panel.rows)
            m = len(panel.cols)
            if panel_buffer is None:  # the first panel is the largest
                panel_buffer = features.new_empty(triton.cdiv(n, t.rows) * t.rows, triton.cdiv(m, t.cols) * t.cols)
            yield panel, panel_buffer
            g_nm = panel_buffer[:n, :m]
            if panel.rows.grad is not None:
                self.runtime.add_product(panel.rows.grad, g_nm, panel.cols.features, factor)
            if panel.cols.grad is not None:
                self.runtime.add_product(panel.cols.grad, g_nm.T, panel.rows.features, factor)


def _even_size(size: int, most: int, tile: int) -> int:
    """The size, in whole tiles, of the fewest about equal parts of `size` that are at most `most` before rounding."""
    parts = triton.cdiv(size, most)
    part = triton.cdiv(size, parts)
    return triton.cdiv(part, tile) * tile
