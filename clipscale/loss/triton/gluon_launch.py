"""Launches the warp-specialised kernels. Gluon is imported where they are used.

Letters as in gluon_pipeline.py.
"""

from typing import Any

from torch import Tensor

from clipscale.loss.triton.panels import PaddedBlock, Panel, SideTerms
from clipscale.loss.triton.tuning import GLUON_ROWS, Tiles

SLOTS = 14
"""Tiles of 128 x 64 halves that fit in shared memory beside the barriers: 227 KiB on Hopper and Blackwell."""


def shared_slots(tiles: Tiles, steps: int, staging: int) -> dict[str, Any]:
    """How the kernels divide shared memory: the steps of the columns' operand that stay, and whether the others are loaded with each tile.

    `staging`: slots that the output takes.
    """
    left = SLOTS - tiles.stages * tiles.rows // GLUON_ROWS - staging
    streams = steps > left
    return {"RESIDENT": left - tiles.stages if streams else steps, "STREAMS": streams}


def launch_lse(
    padded: PaddedBlock, panel: Panel, strips: int, t: Tensor, reference: Tensor, parts: list[Tensor], **flags: bool
) -> None:
    """lse_kernel's sums of a panel of whole tile columns. The columns have tiles.col_lines lines for each strip."""
    from clipscale.loss.triton.gluon_softmax import lse_gluon_kernel

    wide = len(panel.v) // padded.tiles.cols
    sizes = len(panel.u), len(panel.v), panel.u.shape[1], strips
    _launch(padded, lse_gluon_kernel, panel, strips * wide, 0, padded.factor, t, reference, *parts, *sizes, **flags)


def launch_gradient(
    padded: PaddedBlock, panel: Panel, a: SideTerms, b: SideTerms, scores: Tensor, sums: Tensor, **flags: bool
) -> None:
    """softmax_gradient_kernel's panel of score gradients."""
    from clipscale.loss.triton.gluon_softmax import softmax_gradient_gluon_kernel

    tiles = padded.tiles
    wide, staging = -(-len(panel.v) // tiles.cols), tiles.rows // GLUON_ROWS
    _launch(
        padded, softmax_gradient_gluon_kernel, panel, tiles.group * wide, staging, padded.factor, a.lse, a.weight, a.factor, b.factor,
        a.smoothing, b.smoothing, a.low, b.low, _described(scores, GLUON_ROWS, tiles.cols // 4), sums,
        len(panel.u), len(panel.v), panel.u.shape[1], panel.positive, tiles.group, **flags,
    )  # fmt: skip


def _launch(
    padded: PaddedBlock, kernel: Any, panel: Panel, grid: int, staging: int, *given: Any, **flags: bool
) -> None:
    tiles = padded.tiles
    padded.machine.launch(
        kernel, grid, padded.device, tiles,
        _described(panel.u, GLUON_ROWS, tiles.depth), _described(panel.v, tiles.cols, tiles.depth), *given,
        **flags, BM=GLUON_ROWS, BN=tiles.cols, BK=tiles.depth, HALVES=tiles.rows // GLUON_ROWS, STAGES=tiles.stages,
        **shared_slots(tiles, panel.u.shape[1] // tiles.depth, staging),
    )  # fmt: skip


def _described(x: Tensor, height: int, width: int) -> Any:
    """A tensor descriptor with blocks of height x width, in the layout that the tensor cores read."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(min(128, width * x.element_size()), 8 * x.element_size(), 2)
    return TensorDescriptor.from_tensor(x, [height, width], layout)
