"""The similarities of images and texts: the scores of a tile, and their vector-Jacobian product.

`scores(tile, out)` returns scale * similarity (n, m). `vjp(tile, out)` returns the same and a function that takes the
scores' gradient and adds to the `grad` of rows, columns and parameters. Both may write to `out`.

Letters: n rows (images), m columns (texts) of a tile; D feature width.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from clipscale.loss.block import Block, to_sum_dtype

Accumulate = Callable[[Tensor], None]
GPU_TILE = 4096, 8192  # rows and columns of the dot product's tiles
CPU_TILE = 1024, 2048
MODULE_TILE = 128, 128  # for a module, which may hold some thousand numbers for each pair
# A GPU rounds the scores' gradients to the features' type before their product. They are about 1/N, which float16 holds
# with few digits or as 0, and at most 1. So they are multiplied by this before, as the Triton kernels do.
FLOAT16_GRAD_SCALE = 2.0**13


class DotProduct:
    """<u_i, v_j>, with its gradient written out: dU = scale G V, dV = scale G'U."""

    # It draws no random numbers, takes tiles in any order, and is linear in each side. So
    # scale * dL/dscale = sum_i <u_i, dU_i>.
    is_dot_product = True
    parameters: tuple[Tensor, ...] = ()

    def tile_shape(self, on_gpu: bool) -> tuple[int, int]:
        """Rows and columns of a tile: far fewer than a block has, and enough for a fast matmul."""
        return GPU_TILE if on_gpu else CPU_TILE

    def bound(self, block: Block) -> float | None:
        """An upper bound of |score| in the block, by Cauchy-Schwarz."""
        scale = block.parameters.scale
        longest_u = _largest_norm(block.rows.features, scale.dtype)
        longest_v = _largest_norm(block.cols.features, scale.dtype)
        return float(scale.abs() * longest_u * longest_v)

    def scores(self, tile: Block, out: Tensor) -> Tensor:
        return matmul_into(tile.rows.features, tile.cols.features.T, out, tile.parameters.scale_number)

    def vjp(self, tile: Block, out: Tensor) -> tuple[Tensor, Accumulate]:
        rows = tile.rows
        cols = tile.cols
        scale = tile.parameters.scale_number

        def accumulate(g_nm: Tensor) -> None:
            factor = scale
            if rows.features.dtype == torch.float16:
                g_nm.mul_(FLOAT16_GRAD_SCALE)
                factor = scale / FLOAT16_GRAD_SCALE
            if rows.grad is not None:
                matmul_into(g_nm, cols.features, rows.grad, factor, beta=1)
            if cols.grad is not None:
                matmul_into(g_nm.T, rows.features, cols.grad, factor, beta=1)

        return self.scores(tile, out), accumulate


def _largest_norm(features: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.linalg.vector_norm(features, dim=1, dtype=dtype).max()


class ModuleSimilarity:
    """Phi(u, v): a module that maps features (n, ...) and (m, ...) to similarities (n, m), each of one pair.

    The backward pass recomputes each tile with a graph and passes the scores' gradient through it. So Phi's parameters
    get their gradient tile by tile, and one tile's graph exists at a time: the Distance Gradient Cache (Gao et al.
    2021, arXiv 2101.06983). Both passes run Phi under the autocast setting in force when this object is made.
    """

    is_dot_product = False

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module
        self.parameters = tuple(p for p in module.parameters() if p.requires_grad)
        self._device_type = device.type
        self._autocast_enabled = torch.is_autocast_enabled(device.type)
        self._autocast_dtype = torch.get_autocast_dtype(device.type)

    def tile_shape(self, on_gpu: bool) -> tuple[int, int]:
        return MODULE_TILE

    def bound(self, block: Block) -> float | None:
        """None: the bound is unknown before the scores are computed."""
        return None

    def scores(self, tile: Block, out: Tensor) -> Tensor:
        scale = tile.parameters.scale
        with torch.no_grad():
            return self._similarities(tile.rows.features, tile.cols.features, scale.dtype) * scale

    def vjp(self, tile: Block, out: Tensor) -> tuple[Tensor, Accumulate]:
        parameters = tile.parameters
        u = tile.rows.features.detach().requires_grad_(tile.rows.grad is not None)
        v = tile.cols.features.detach().requires_grad_(tile.cols.grad is not None)
        scale = parameters.scale.detach().requires_grad_(parameters.trains_scale)
        scale_grad = torch.zeros_like(scale, dtype=torch.float64) if parameters.trains_scale else None
        # Each tensor, and where its gradient is summed; None if it is frozen.
        pairs = [
            (u, tile.rows.grad),
            (v, tile.cols.grad),
            (scale, scale_grad),
            *zip(self.parameters, parameters.module_grads),
        ]
        trained = [(x, total) for x, total in pairs if total is not None]
        with torch.set_grad_enabled(bool(trained)):
            scores = scale * self._similarities(u, v, scale.dtype)

        def accumulate(score_grad: Tensor) -> None:
            if not scores.requires_grad:
                return
            grads = torch.autograd.grad(scores, [x for x, _ in trained], score_grad, allow_unused=True)
            for (_, total), grad in zip(trained, grads):
                if grad is not None:
                    total += grad
            if scale_grad is not None:
                parameters.add_scale_grad(scale_grad)

        return scores.detach().clone(), accumulate

    def _similarities(self, u: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
        with torch.autocast(self._device_type, self._autocast_dtype, self._autocast_enabled):
            scores: Tensor = self.module(u, v)
        if scores.shape != (len(u), len(v)):
            raise ValueError(
                f"the similarity module must map {len(u)} images and {len(v)} texts to a number a pair, but gave "
                f"{tuple(scores.shape)}"
            )
        return scores.to(dtype)


Similarity = DotProduct | ModuleSimilarity
# Rows of two matrices, and where their products go.
Stripe = tuple[Tensor, Tensor, Tensor]


def matmul_into(a: Tensor, b: Tensor, out: Tensor, alpha: float, beta: float = 0.0) -> Tensor:
    """out = beta * out + alpha * a b, accumulated in the type of out.

    On CUDA, where one operand is in half precision, the other is rounded to it.
    """
    if a.dtype == out.dtype == b.dtype:
        return torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    if not a.is_cuda:
        return matmul_into(a.to(out.dtype), b.to(out.dtype), out, alpha, beta)
    half = b.dtype if a.dtype == out.dtype else a.dtype
    wide = torch.mm(a.to(half), b.to(half), out_dtype=out.dtype)
    if beta == 0:
        return torch.mul(wide, alpha, out=out)
    return out.mul_(beta).add_(wide, alpha=alpha)


def row_products(x: Tensor, y: Tensor, stripes_to_run: Callable[[Iterator[Stripe]], Iterator[Stripe]] = iter) -> Tensor:
    """<x_i, y_i> (n,) in float64, for x and y (n, ...). Computed stripe by stripe: the elementwise product would be as
    large as the inputs.

    `stripes_to_run`: chooses the stripes to compute (LossRuntime.tiles_to_run).
    """
    products = torch.empty(len(x), dtype=torch.float64, device=x.device)
    stripe_entries = 2**24 if x.is_cuda else 2**20
    step = max(1, stripe_entries // x[0].numel())
    stripes = zip(x.split(step), y.split(step), products.split(step))
    for a, b, out in stripes_to_run(stripes):
        out.copy_((to_sum_dtype(a) * b).reshape(len(a), -1).sum(1, dtype=torch.float64))
    return products
