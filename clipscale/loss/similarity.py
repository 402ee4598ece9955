"""The similarities of an image and a text: the scores of a tile, and a gradient of scores pushed back through them.

Letters: n rows (images), m columns (texts) of a tile; D feature width; T tokens of an image, S of a text.
`scores(tile, out)` gives scale * similarity: one (n, m) tensor for both directions, or two where the similarity is another one each way.
`linearise(tile, out)` gives the same and a function that takes their gradient and adds what follows from it to the sides' `grad`;
scores already known need not be computed again.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from clipscale.loss.block import Block, Side

Pull = Callable[[list[Tensor]], None]


def product(a: Tensor, b: Tensor, out: Tensor, alpha: float, beta: float = 0.0) -> Tensor:
    """out = beta * out + alpha * a b, accumulated in the dtype of out; on CUDA a half-precision operand makes the other one so too."""
    if a.dtype == out.dtype == b.dtype:
        return torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    if not a.is_cuda:
        return product(a.to(out.dtype), b.to(out.dtype), out, alpha, beta)
    half = b.dtype if a.dtype == out.dtype else a.dtype
    wide = torch.mm(a.to(half), b.to(half), out_dtype=out.dtype)
    return out.mul_(beta).add_(wide, alpha=alpha) if beta else torch.mul(wide, alpha, out=out)


def row_products(x: Tensor, y: Tensor) -> Tensor:
    """<x_i, y_i> in float64, for x and y of shape (n, ...); slab by slab, since their product is as large as they are."""
    found = torch.empty(len(x), dtype=torch.float64, device=x.device)
    step = max(1, (2**24 if x.is_cuda else 2**20) // max(1, x[0].numel()))
    for a, b, place in zip(x.split(step), y.split(step), found.split(step)):
        place.copy_((widened(a) * b).reshape(len(a), -1).sum(1, dtype=torch.float64))
    return found


CUDA_TILE, CPU_TILE = (4096, 8192), (1024, 2048)  # rows and columns of the dot product's tiles


def widened(x: Tensor) -> Tensor:
    """x in the dtype of its sums: float32, or float64 where x is."""
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


class Dot:
    """<u_i, v_j>, with its gradient written out: dU = scale G V, dV = scale G'U."""

    homogeneous = True  # degree one in each side, hence scale * dL/dscale = sum_i <u_i, dU_i>
    parameters: tuple[Tensor, ...] = ()

    def tile(self, block: Block) -> tuple[int, int]:
        """Rows and columns of a tile: small beside the block, large enough for matmul."""
        return CUDA_TILE if block.rows.features.is_cuda else CPU_TILE

    def bound(self, block: Block) -> float | None:
        """The largest |score| that the block can hold, by Cauchy-Schwarz."""
        scale = block.shared.scale
        u, v = (torch.linalg.vector_norm(s.features, dim=1, dtype=scale.dtype).max() for s in (block.rows, block.cols))
        return float(scale.abs() * u * v)

    def scores(self, tile: Block, out: Tensor) -> list[Tensor]:
        return [product(tile.rows.features, tile.cols.features.T, out, float(tile.shared.scale))]

    def linearise(self, tile: Block, out: Tensor, known: Tensor | None = None) -> tuple[list[Tensor], Pull]:
        rows, cols, scale = tile.rows, tile.cols, float(tile.shared.scale)

        def pull(grads: list[Tensor]) -> None:
            if rows.grad is not None:
                product(grads[0], cols.features, rows.grad, scale, beta=1)
            if cols.grad is not None:
                product(grads[0].T, rows.features, cols.grad, scale, beta=1)

        return self.scores(tile, out) if known is None else [known], pull

    def swapped(self) -> "Dot":
        return self


class Deep:
    """Phi(u, v), any module that maps features (n, ...) and (m, ...) to similarities (n, m) pair by pair.

    The backward pass recomputes each tile with a graph and pushes the scores' gradient through it, so that Phi's parameters, too, get
    their gradient tile by tile and only one tile's graph ever exists: the Distance Gradient Cache (Gao et al. 2021, arXiv 2101.06983).
    Phi runs under the autocast setting found when this object is made, in both passes.
    """

    homogeneous = False
    largest_tile = 2**14  # pairs: Phi may well hold some thousand numbers for each

    def __init__(self, module: nn.Module | None, device: torch.device) -> None:
        self.module, self.is_swapped = module, False
        self.parameters = () if module is None else tuple(p for p in module.parameters() if p.requires_grad)
        self._device_type = device.type
        self._autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

    def tile(self, block: Block) -> tuple[int, int]:
        side = math.isqrt(self.largest_tile)
        return side, side

    def bound(self, block: Block) -> float | None:
        """Not known before the scores are."""
        return None

    def scores(self, tile: Block, out: Tensor) -> list[Tensor]:
        scale = tile.shared.scale
        with torch.no_grad():
            return [score * scale for score in self._similarities(tile.rows, tile.cols, scale.dtype)]

    def linearise(self, tile: Block, out: Tensor, known: Tensor | None = None) -> tuple[list[Tensor], Pull]:
        shared = tile.shared
        wanted: list[tuple[Tensor, Tensor]] = []  # (the leaf, where its gradient is added up)

        def leaf(x: Tensor, grad: Tensor | None) -> Tensor:
            x = x.detach().requires_grad_(grad is not None)
            if grad is not None:
                wanted.append((x, grad))
            return x

        rows = replace(tile.rows, features=leaf(tile.rows.features, tile.rows.grad))
        cols = replace(tile.cols, features=leaf(tile.cols.features, tile.cols.grad))
        scale = leaf(shared.scale, shared.scale_grad)
        wanted += [(p, grad) for p, grad in zip(self.parameters, shared.parameter_grads) if grad is not None]
        with torch.enable_grad():
            scores = [scale * score for score in self._similarities(rows, cols, scale.dtype)]

        def pull(grads: list[Tensor]) -> None:
            reached = [(score, grad) for score, grad in zip(scores, grads) if score.requires_grad]
            if not reached or not wanted:
                return
            outputs, output_grads = zip(*reached)
            found = torch.autograd.grad(outputs, [x for x, _ in wanted], output_grads, allow_unused=True)
            for (_, total), grad in zip(wanted, found):
                if grad is not None:
                    total += grad

        return [score.detach().clone() for score in scores], pull

    def swapped(self) -> "Deep":
        """The same similarity for texts as rows and images as columns."""
        other = copy.copy(self)
        other.is_swapped = not self.is_swapped
        return other

    def _similarities(self, rows: Side, cols: Side, dtype: torch.dtype) -> list[Tensor]:
        enabled, autocast_dtype = self._autocast
        with torch.autocast(self._device_type, autocast_dtype, enabled):
            found = [s.T for s in reversed(self._pairs(cols, rows))] if self.is_swapped else self._pairs(rows, cols)
        if any(s.shape != (len(rows), len(cols)) for s in found):
            shapes = ", ".join(str(tuple(s.shape)) for s in found)
            raise ValueError(
                f"the similarity module must map {len(rows)} images and {len(cols)} texts to ({len(rows)}, {len(cols)}) but gave {shapes}"
            )
        return [s.to(dtype) for s in found]

    def _pairs(self, images: Side, texts: Side) -> list[Tensor]:
        assert self.module is not None
        return [self.module(images.features, texts.features)]


class Late(Deep):
    """Late interaction over token features (FILIP; Yao et al. 2021, arXiv 2111.07783, section 3.1).

    Image to text: the mean over the image's tokens of the largest <u_it, v_js> over the text's tokens; text to image the other way
    round. Tokens whose mask is false are left out of the mean and of the maximum. Tied maxima share the gradient evenly.
    """

    homogeneous = True
    largest_tile = 2**22  # token pairs

    def __init__(self, device: torch.device) -> None:
        super().__init__(None, device)
        self._autocast = False, self._autocast[1]  # the operands' dtype is chosen already

    def tile(self, block: Block) -> tuple[int, int]:
        token_pairs = block.rows.features.shape[1] * block.cols.features.shape[1]
        side = max(1, math.isqrt(self.largest_tile // token_pairs))
        return side, side

    def _pairs(self, images: Side, texts: Side) -> list[Tensor]:
        u, v = widened(images.features), widened(texts.features)
        tokens = (u.flatten(0, 1) @ v.flatten(0, 1).T).view(*u.shape[:2], *v.shape[:2])  # (n, T, m, S)
        to_text = tokens if texts.mask is None else tokens.masked_fill(~texts.mask, -torch.inf)
        to_image = tokens if images.mask is None else tokens.masked_fill(~images.mask[:, :, None, None], -torch.inf)
        best_text, best_image = to_text.amax(3), to_image.amax(1)  # (n, T, m) and (n, m, S)
        return [_masked_mean(best_text, images.mask, 1), _masked_mean(best_image, texts.mask, 2)]


def _masked_mean(x: Tensor, mask: Tensor | None, dim: int) -> Tensor:
    """The mean of x over `dim` where the mask holds. x is (n, T, m) with mask (n, T), or (n, m, S) with mask (m, S)."""
    if mask is None:
        return x.mean(dim)
    weight = mask.to(x.dtype) / mask.sum(1, keepdim=True)
    return torch.einsum("itj,it->ij" if dim == 1 else "ijs,js->ij", x, weight)


Similarity = Dot | Deep
