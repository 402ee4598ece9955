"""The similarities of images and texts: the scores of a tile, and their vector-Jacobian product.

`scores(tile, out)` returns scale * similarity: one tensor (n, m), or two (image to text, text to image) where the
directions differ. `vjp(tile, out)` returns the same and a function from the scores' gradients that adds to the `grad`
of rows, columns and parameters.

Letters: n rows (images), m columns (texts) of a tile; D feature width; T tokens of an image, S of a text.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from clipscale.loss.block import Block, RowBlock, widened

Vjp = Callable[[list[Tensor]], None]
SIMILARITIES = ("dot", "late")
GPU_TILE, CPU_TILE = (4096, 8192), (1024, 2048)  # rows and columns of the dot product's tiles


class Dot:
    """<u_i, v_j>, with its gradient written out: dU = scale G V, dV = scale G'U."""

    homogeneous = True  # of degree one in each side, hence scale * dL/dscale = sum_i <u_i, dU_i>
    parameters: tuple[Tensor, ...] = ()

    def tile_shape(self, block: Block, on_gpu: bool) -> tuple[int, int]:
        """Rows and columns of a tile: small beside the block, large enough for matmul."""
        return GPU_TILE if on_gpu else CPU_TILE

    def bound(self, block: Block) -> float | None:
        """An upper bound of |score| in the block, by Cauchy-Schwarz."""
        scale = block.parameters.scale
        u, v = (torch.linalg.vector_norm(s.features, dim=1, dtype=scale.dtype).max() for s in (block.rows, block.cols))
        return float(scale.abs() * u * v)

    def scores(self, tile: Block, out: Tensor) -> list[Tensor]:
        return [product(tile.rows.features, tile.cols.features.T, out, float(tile.parameters.scale))]

    def vjp(self, tile: Block, out: Tensor) -> tuple[list[Tensor], Vjp]:
        rows, cols, scale = tile.rows, tile.cols, float(tile.parameters.scale)

        def vjp(score_grads: list[Tensor]) -> None:
            (g_nm,) = score_grads
            if rows.grad is not None:
                product(g_nm, cols.features, rows.grad, scale, beta=1)
            if cols.grad is not None:
                product(g_nm.T, rows.features, cols.grad, scale, beta=1)

        return self.scores(tile, out), vjp

    def swapped(self) -> "Dot":
        return self


class Deep:
    """Phi(u, v): a module that maps features (n, ...) and (m, ...) to similarities (n, m), each of one pair.

    The backward pass recomputes each tile with a graph and passes the scores' gradient through it. So Phi's parameters
    get their gradient tile by tile, and one tile's graph exists at a time: the Distance Gradient Cache (Gao et al.
    2021, arXiv 2101.06983). Both passes run Phi under the autocast setting in force when this object is made.
    """

    homogeneous = False
    largest_tile = 2**14  # pairs: Phi may hold some thousand numbers for each

    def __init__(self, module: nn.Module | None, device: torch.device) -> None:
        self.module, self.is_swapped = module, False
        self.parameters = () if module is None else tuple(p for p in module.parameters() if p.requires_grad)
        self._device_type = device.type
        self._autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

    def tile_shape(self, block: Block, on_gpu: bool) -> tuple[int, int]:
        side = math.isqrt(self.largest_tile)
        return side, side

    def bound(self, block: Block) -> float | None:
        """Unknown before the scores are."""
        return None

    def scores(self, tile: Block, out: Tensor) -> list[Tensor]:
        scale = tile.parameters.scale
        with torch.no_grad():
            return [score * scale for score in self._similarities(tile.rows, tile.cols, scale.dtype)]

    def vjp(self, tile: Block, out: Tensor) -> tuple[list[Tensor], Vjp]:
        parameters = tile.parameters
        leaves: list[tuple[Tensor, Tensor]] = []  # (leaf of the graph, the sum of its gradients)

        def leaf(x: Tensor, grad: Tensor | None) -> Tensor:
            x = x.detach().requires_grad_(grad is not None)
            if grad is not None:
                leaves.append((x, grad))
            return x

        rows = replace(tile.rows, features=leaf(tile.rows.features, tile.rows.grad))
        cols = replace(tile.cols, features=leaf(tile.cols.features, tile.cols.grad))
        scale = leaf(parameters.scale, parameters.scale_grad)
        leaves += [(p, grad) for p, grad in zip(self.parameters, parameters.module_grads) if grad is not None]
        with torch.enable_grad():
            scores = [scale * score for score in self._similarities(rows, cols, scale.dtype)]

        def vjp(score_grads: list[Tensor]) -> None:
            differentiable = [(score, grad) for score, grad in zip(scores, score_grads) if score.requires_grad]
            if not differentiable or not leaves:
                return
            outputs, output_grads = zip(*differentiable)
            grads = torch.autograd.grad(outputs, [x for x, _ in leaves], output_grads, allow_unused=True)
            for (_, total), grad in zip(leaves, grads):
                if grad is not None:
                    total += grad

        return [score.detach().clone() for score in scores], vjp

    def swapped(self) -> "Deep":
        """The same similarity for texts as rows and images as columns."""
        other = copy.copy(self)
        other.is_swapped = not self.is_swapped
        return other

    def _similarities(self, rows: RowBlock, cols: RowBlock, dtype: torch.dtype) -> list[Tensor]:
        enabled, autocast_dtype = self._autocast
        with torch.autocast(self._device_type, autocast_dtype, enabled):
            scores = [s.T for s in reversed(self._pairs(cols, rows))] if self.is_swapped else self._pairs(rows, cols)
        if any(s.shape != (len(rows), len(cols)) for s in scores):
            raise ValueError(
                f"the similarity module must map {len(rows)} images and {len(cols)} texts to a number a pair, but gave "
                + ", ".join(str(tuple(s.shape)) for s in scores)
            )
        return [s.to(dtype) for s in scores]

    def _pairs(self, images: RowBlock, texts: RowBlock) -> list[Tensor]:
        assert self.module is not None
        return [self.module(images.features, texts.features)]


class Late(Deep):
    """Late interaction over token features (FILIP; Yao et al. 2021, arXiv 2111.07783, section 3.1).

    Image to text: the mean over the image's tokens of the largest <u_it, v_js> over the text's tokens. Text to image:
    the reverse. Tokens whose mask is false are left out of the mean and of the maximum. Tied maxima share the gradient
    evenly.
    """

    homogeneous = True
    largest_tile = 2**22  # token pairs

    def __init__(self, device: torch.device) -> None:
        super().__init__(None, device)
        self._autocast = False, self._autocast[1]  # the features are cast already

    def tile_shape(self, block: Block, on_gpu: bool) -> tuple[int, int]:
        token_pairs = block.rows.features.shape[1] * block.cols.features.shape[1]
        side = max(1, math.isqrt(self.largest_tile // token_pairs))
        return side, side

    def _pairs(self, images: RowBlock, texts: RowBlock) -> list[Tensor]:
        u, v = widened(images.features), widened(texts.features)
        tokens = (u.flatten(0, 1) @ v.flatten(0, 1).T).view(*u.shape[:2], *v.shape[:2])  # (n, T, m, S)
        to_text = tokens if texts.mask is None else tokens.masked_fill(~texts.mask, -torch.inf)
        to_image = tokens if images.mask is None else tokens.masked_fill(~images.mask[:, :, None, None], -torch.inf)
        best_text, best_image = to_text.amax(3), to_image.amax(1)  # (n, T, m) and (n, m, S)
        return [_masked_mean(best_text, images.mask, 1), _masked_mean(best_image, texts.mask, 2)]


Similarity = Dot | Deep


def product(a: Tensor, b: Tensor, out: Tensor, alpha: float, beta: float = 0.0) -> Tensor:
    """out = beta * out + alpha * a b, accumulated in the type of out.

    On CUDA, where one operand is in half precision, the other is rounded to it.
    """
    if a.dtype == out.dtype == b.dtype:
        return torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    if not a.is_cuda:
        return product(a.to(out.dtype), b.to(out.dtype), out, alpha, beta)
    half = b.dtype if a.dtype == out.dtype else a.dtype
    wide = torch.mm(a.to(half), b.to(half), out_dtype=out.dtype)
    return out.mul_(beta).add_(wide, alpha=alpha) if beta else torch.mul(wide, alpha, out=out)


def row_products(x: Tensor, y: Tensor) -> Tensor:
    """<x_i, y_i> (n,) in float64, for x and y (n, ...). By slabs of rows: the product of both is as large as they."""
    products = torch.empty(len(x), dtype=torch.float64, device=x.device)
    step = max(1, (2**24 if x.is_cuda else 2**20) // x[0].numel())
    for a, b, place in zip(x.split(step), y.split(step), products.split(step)):
        place.copy_((widened(a) * b).reshape(len(a), -1).sum(1, dtype=torch.float64))
    return products


def _masked_mean(x: Tensor, mask: Tensor | None, dim: int) -> Tensor:
    """The mean of x over `dim` where the mask is true: x (n, T, m) with mask (n, T), or (n, m, S) with (m, S)."""
    if mask is None:
        return x.mean(dim)
    weight = mask.to(x.dtype) / mask.sum(1, keepdim=True)
    return torch.einsum("itj,it->ij" if dim == 1 else "ijs,js->ij", x, weight)
