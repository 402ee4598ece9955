"""The Triton backend of the dot product: log-sum-exps and gradients of one block, in memory linear in its rows and columns.

The forward kernels leave partial sums of a panel's tiles, which are added in a fixed order. The backward kernels leave a panel of score
gradients, from which the GEMM library adds to both feature gradients in float32. No atomics: the same inputs give the same bits (as far
as the GEMM library does on one stream).

Letters: n rows (images), m columns (texts), D feature width. x_ij = scale <u_i, v_j>.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from clipscale.loss.block import Block, Parameters
from clipscale.loss.kept import Exponentials, Kept
from clipscale.loss.machine import Machine
from clipscale.loss.objective import Objective, Sigmoid, Softmax
from clipscale.loss.similarity import product, row_products
from clipscale.loss.triton.panels import HEADROOM, PaddedBlock, chosen_tiles, side_terms
from clipscale.loss.triton.sigmoid import sigmoid_kernel
from clipscale.loss.triton.softmax import (
    OWN,
    SUMS,
    TOPS,
    kept_gradient_kernel,
    lse_kernel,
    softmax_gradient_kernel,
    special_gradient_kernel,
)
from clipscale.loss.triton.tuning import PASSES, Tuning, arithmetic_of

# Of exponentials relative to a reference. Terms below 2^-126 are lost: 2^22 of them are under 2^-24 of the smallest sum.
SMALLEST_SUM, LARGEST_SUM = 2.0**-80, 2.0**126
WARM_BYTES = 2**24  # for the exponentials of a warm-up
WARM: set[tuple[Hashable, ...]] = set()  # what has been warmed up in this process


class TritonBackend(ABC):
    """A backend (see TorchBackend) on CUDA or in Triton's interpreter, for bfloat16, float16 and float32 features with any strides.

    Raises RuntimeError with the reason where a kernel cannot be compiled or launched.
    """

    splits_rows = True
    sums_scale_grad = True
    sums_pairs = False

    def __init__(
        self, objective: Objective, fp32_precision: str, tuning: Tuning, machine: Machine, kept: Kept | None = None
    ) -> None:
        self.objective, self.precision, self.tuning, self.machine = objective, fp32_precision, tuning, machine
        self.kept = kept or Kept()

    @abstractmethod
    def forward(self, block: Block) -> None:
        """Add a block's sums."""

    @abstractmethod
    def backward(self, block: Block) -> None:
        """Add a block's gradients, given the sums of all blocks."""

    def forward_backward(self, block: Block) -> None:
        """Both at once, where the objective is a sum over pairs. Raises TypeError where it is not."""
        raise TypeError(f"{type(self).__name__}: the gradient needs the sums of all blocks")

    def padded_width(self, features: Tensor) -> int:
        """A whole number of steps of every pass's kernels."""
        arithmetic = arithmetic_of(features.dtype, self.precision)
        chosen = (chosen_tiles(features.device, x, arithmetic, self.tuning, self.machine) for x in PASSES)
        step = math.lcm(*(tiles.depth for tiles in chosen))
        return -(-features.shape[-1] // step) * step

    def warm_up(self, block: Block) -> None:
        """Run every variant of every kernel once, on this block's row against a tile of its column and one more."""
        rows, cols, keeps = block.rows, block.cols, self.kept.budget > 0
        facts = [keeps, *(x is not None for side in (rows, cols) for x in (side.keys, side.weight, side.grad))]
        features = rows.features
        key = (features.device, features.dtype, features.shape[1], self.precision, self.tuning, self.objective, *facts)
        if key in WARM:
            return
        zero = torch.zeros((), dtype=torch.float64, device=features.device)
        width = self.padded(block, "sigmoid" if self.sums_pairs else "forward").tiles.cols + 1
        cols = cols[torch.zeros(width, dtype=torch.int64, device=features.device)]
        rows, cols = (replace(x, lse=None if x.weight is None else x.empty_lse()) for x in (rows, cols))
        rows.target = zero.expand(1).clone()
        scale, bias = block.parameters.scale, block.parameters.bias
        block = Block(rows, cols, Parameters(scale, bias, zero.clone(), zero.clone()), 0)
        trains, kept = rows.grad is not None or cols.grad is not None, self.kept
        try:
            for budget in (0.0, WARM_BYTES) if keeps else (0.0,):
                self.kept = Kept(budget)
                if not (trains and self.sums_pairs):
                    self.forward(block)
                if trains:
                    (self.forward_backward if self.sums_pairs else self.backward)(block)
        finally:
            self.kept = kept
        zero.item()  # waits for the device
        WARM.add(key)

    def padded(self, block: Block, kernel_pass: str, gluon: bool = True) -> PaddedBlock:
        # Only the plain kernels keep exponentials.
        gluon = gluon and self.tuning.gluon and not (self.kept.budget or self.kept.visits)
        return PaddedBlock(block, self.precision, kernel_pass, replace(self.tuning, gluon=gluon), self.machine)


class TritonSoftmax(TritonBackend):
    """The softmax objective."""

    objective: Softmax

    def forward(self, block: Block) -> None:
        """Log-sum-exps by the kernels, targets by the library: one matmul unit (2 n m D FLOP) for one direction or both.

        Log-sum-exps are float64: float32 would round a value near 100 by 4e-6, and with it every probability of that row.
        """
        rows, cols = block.rows, block.cols
        u, v, scale, diagonal = rows.features, cols.features, block.parameters.scale, block.diagonal()
        found = torch.full((len(u),), -torch.inf, dtype=torch.float64, device=u.device)
        if diagonal is not None:
            i, j = diagonal
            found[i] = scale * row_products(self._rounded(u[i]), self._rounded(v[j]))
        for side, lse in zip((rows, cols), self.log_sum_exps(block, found)):
            if side.lse is not None and lse is not None:
                side.lse.copy_(torch.logaddexp(side.lse, lse))
        directions = self.objective.directions(block)
        assert rows.target is not None
        if diagonal is not None:
            self.objective.add_positives(found[diagonal[0]], directions, block, diagonal)
        for one in directions if self.objective.smoothing else []:
            # The sum of a row's scores is its product with the sum of the columns; in the texts' direction, with their weighted sum.
            is_rows = one.dim == 1
            weight = torch.ones_like(v[:, 0]) if is_rows else one.weight
            total = product(weight[None, :], v, scale.new_empty(1, v.shape[1]), 1.0)
            sums = scale * one.smoothing * row_products(u, total.expand_as(u))
            rows.target += sums * one.weight if is_rows else sums

    def log_sum_exps(self, block: Block, positives: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Of this block's rows (n,) and columns (m,); None in a direction without a softmax.

        The reference of a row is a lower bound of its log-sum-exp: what earlier blocks have found, or the score of its positive, in
        `positives` (n,), -inf where it is elsewhere. If terms of a sum may be lost, or it is infinite, the kernels run twice more: for the
        largest scores, and for sums relative to those. The device decides that; nothing waits for it.
        """
        padded, rows = self.padded(block, "forward"), block.rows.lse
        kept = self._opened(padded, block)
        known = positives if rows is None else torch.maximum(positives, rows)
        base = (known * padded.units).masked_fill(known == -torch.inf, 0).round().float()  # 2^(R_i - t) is then exact
        t = base.max() - HEADROOM
        always = torch.ones((), dtype=torch.int32, device=padded.device)
        row_sum, col_sum = self._found(padded, SUMS, block, (base, None), t, always, kept)
        # A row that earlier blocks have terms of may have small ones here. NaN is not kept.
        may_be_small = False if rows is None else rows > -torch.inf, False
        sound = [
            ((x <= LARGEST_SUM) & ((x >= SMALLEST_SUM) | small)).all()
            for x, small in zip((row_sum, col_sum), may_be_small)
            if x is not None
        ]
        again = ~torch.stack(sound).all()
        tops = self._found(padded, TOPS, block, (base, None), t, again.int())
        own = [None if x is None else x.masked_fill(x == -torch.inf, 0).float() for x in tops]
        found = self._found(padded, OWN, block, (base if own[0] is None else own[0], own[1]), t, again.int(), kept)
        if kept is not None and own[0] is not None:
            references = torch.where(again, own[0], base)[: len(kept.per_row)]
            kept.per_row[: len(references)] = references
        row_lse, col_lse = (
            None
            if x is None or y is None or r is None
            else torch.where(again, y.log2() + r, x.log2() + fixed.double()) / padded.units
            for x, y, r, fixed in zip((row_sum, col_sum), found, own, (base, t))
        )
        return row_lse, col_lse

    def _found(
        self, padded: PaddedBlock, find: Any, block: Block, references: Sequence[Tensor | None], t: Tensor, enabled: Tensor,
        kept: Exponentials | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """What lse_kernel finds for the rows (n,) and columns (m,), float64. Exponentials that `kept` has memory for are stored there."""
        tiles, start = padded.tiles, -torch.inf if find is TOPS else 0.0
        found = [None if x.lse is None else torch.full_like(x.lse, start) for x in (block.rows, block.cols)]
        rare = tiles.rare
        height, width = padded.panel_shape(self.tuning.partial_bytes // 4 * rare.cols)
        strips, wide = tiles.group, triton.cdiv(width, rare.cols)
        sizes = [0 if x is None else size for x, size in zip(found, (wide * height, strips * tiles.col_lines * width))]
        parts = [torch.empty(size, device=padded.device) for size in sizes]
        for panel in padded.panels(height, width, edge_apart=True):
            edge = len(panel.v) % tiles.cols != 0
            used = tiles if find is SUMS and not edge else rare
            wide = triton.cdiv(len(panel.v), used.cols)
            where = panel.rows, panel.cols
            store = parts[0][:1] if kept is None else kept.values[panel.i :, panel.j :]
            if used.gluon and references[0] is not None:
                padded.launch_gluon(
                    "gluon_lse_kernel", panel, padded.factor, t, references[0][panel.rows], *parts,
                    ROWS=found[0] is not None, COLS=found[1] is not None,
                )  # fmt: skip
            else:
                padded.launch(
                    lse_kernel, panel, strips * wide, padded.factor, t,
                    *(None if x is None else x[part] for x, part in zip(references, where)), enabled, *panel.keys, *parts,
                    padded.described(store, used.rows, used.cols // 4) if len(store) and store.dim() > 1 else store,
                    *panel.sizes, panel.positive, strips, len(store), store.stride(0),
                    FIND=find, ROWS=found[0] is not None, COLS=found[1] is not None, EDGE=edge,
                    KEEP=len(store) > 0 and store.dim() > 1, tiles=used,
                )  # fmt: skip
            for total, part, here, lines in zip(found, parts, where, (wide, strips * used.col_lines)):
                if total is not None:
                    of_lines = part[: lines * len(total[here])].view(lines, -1)
                    if find is TOPS:
                        torch.maximum(total[here], of_lines.amax(0), out=total[here])
                    else:
                        total[here] += of_lines.sum(0, dtype=torch.float64)
        return found[0], found[1]

    def _opened(self, padded: PaddedBlock, block: Block) -> Exponentials | None:
        """Memory for the exponentials of this visit's first rows, in whole tiles of both passes; None: for none."""
        if block.rows.weight is None or self.objective.smoothing or not self.kept.budget:
            return None
        later = self.padded(block, "backward").tiles
        high, wide = (math.lcm(*x) for x in ((padded.tiles.rows, later.rows), (padded.tiles.cols, later.cols)))
        rows, cols = triton.cdiv(len(padded.u), high) * high, triton.cdiv(len(padded.v), wide) * wide
        return self.kept.open(block.at[0], rows, cols, high, block.rows.features)

    def backward(self, block: Block) -> None:
        """Add scale * G V to the rows' gradient, scale * G' U to the columns', and sum_ij G_ij <u_i, v_j> to the scale's.

            G_ij = a_i exp(x_ij - r_i) + b_j exp(x_ij - c_j) - a_i e / M - b_j e / N - (1 - e) (a_i + b_j) [j positive of i]

        and 0 for a pair left out, with r, c the complete log-sum-exps, a, b the weights, and label smoothing e over N rows and M columns
        in all. One matmul unit for the scores and one for each side that needs its gradient.
        """
        rows, cols, scale, e = block.rows, block.cols, block.parameters.scale, self.objective.smoothing
        store = rows.grad is not None or cols.grad is not None
        padded = self.padded(block, "backward", store)
        flags: dict[str, Any] = {"ROWS": rows.weight is not None, "COLS": cols.weight is not None, "SMOOTH": e > 0}
        scores = padded.score_gradients()
        stored = padded.described(scores, padded.tiles.rows, padded.tiles.cols // 4)
        total = torch.zeros((), dtype=torch.float64, device=padded.device)
        bound = scale * sum(side.weight.abs().amax() for side in (rows, cols) if side.weight is not None)
        special = padded.tiles.plain.special
        stored_special = padded.described(scores, special.rows, special.cols // 4)
        kept = self._kept_part(padded, block)
        split = 0 if kept is None else len(kept.per_row)
        with padded.accumulating(bound, rows.grad, cols.grad) as gradient_scale:
            r, c = side_terms(block, padded, gradient_scale, self.objective)
            for panel in padded.panels(scores.shape[0], scores.shape[1], split=split):
                a, b = r.part(panel.rows), c.part(panel.cols)
                high, count = triton.cdiv(len(panel.u), special.rows), padded.grid(panel)
                sums = torch.empty(count * padded.tiles.rows + high, device=padded.device)
                shared = (a.smoothing, b.smoothing, a.low, b.low, *panel.keys)
                sizes = (*panel.sizes, scores.stride(0), panel.positive)
                if kept is not None and panel.i < split:
                    from_reference = (kept.per_row[panel.rows] - a.lse).exp2()
                    values = kept.values[panel.i :, panel.j :]
                    padded.launch(
                        kept_gradient_kernel, panel, count, padded.factor, kept.per_row[panel.rows], a.weight * from_reference,
                        a.factor * from_reference, b.factor, a.low, b.low,
                        padded.described(values, padded.tiles.rows, padded.tiles.cols // 4), stored, sums[:-high], *panel.sizes,
                        values.stride(0), *sizes[5:], COLS=flags["COLS"], STORE=store,
                    )  # fmt: skip
                elif padded.tiles.gluon:
                    padded.launch_gluon(
                        "gluon_softmax_gradient_kernel", panel, padded.factor, a.lse, a.weight, a.factor, b.factor,
                        *shared[:4], sums[:-high], scores=scores, **flags,
                    )  # fmt: skip
                else:
                    padded.launch(
                        softmax_gradient_kernel, panel, count, padded.factor, a.lse, a.weight, a.factor, b.factor,
                        *shared, stored, sums[:-high], *sizes, STORE=store, **flags,
                    )  # fmt: skip
                padded.launch(
                    special_gradient_kernel, panel, high, padded.factor, a.lse, b.lse, a.weight, b.weight, a.target, b.target,
                    *shared, stored_special, sums[-high:], *sizes, STORE=store, **flags, tiles=special,
                )  # fmt: skip
                if store:
                    padded.add_products(panel, scores, rows.grad, cols.grad)
                total += sums.sum(dtype=torch.float64)
            if block.parameters.scale_grad is not None:
                block.parameters.scale_grad += total / gradient_scale.double()

    def _kept_part(self, padded: PaddedBlock, block: Block) -> Exponentials | None:
        """What is kept of this part of a visit, in whole tiles of its first rows."""
        visit, row, col = block.at
        kept = self.kept.visits.get(visit)
        if kept is None:
            return None
        count = min(len(kept.values) - row, len(padded.u))
        count = count if count == len(padded.u) else count // padded.tiles.rows * padded.tiles.rows
        return None if count <= 0 else Exponentials(kept.values[row:, col:], kept.per_row[row : row + count])

    def _rounded(self, x: Tensor) -> Tensor:
        """The features as the kernels multiply them: TF32 drops the last 13 bits of a float32."""
        if x.dtype == torch.float32 and x.is_cuda and self.precision == "tf32":
            return (x.view(torch.int32) & -(2**13)).view(torch.float32)
        return x


class TritonSigmoid(TritonBackend):
    """The sigmoid objective."""

    sums_pairs = True

    def forward(self, block: Block) -> None:
        """Subtract the sum over pairs of softplus(-z_ij (x_ij + bias)), z = 1 at positives, else -1, from the target of row 0."""
        self._sweep(block, value=True, gradient=False)

    def backward(self, block: Block) -> None:
        """Add scale * G V to the rows' gradient, scale * G' U to the columns', sum_ij G_ij to the bias's and sum_ij G_ij <u_i, v_j>
        to the scale's. G_ij = sigmoid(x_ij + bias), at positives -sigmoid(-(x_ij + bias)), 0 for a pair left out."""
        self._sweep(block, value=False, gradient=True)

    def forward_backward(self, block: Block) -> None:
        """Both, from one product of the features."""
        self._sweep(block, value=True, gradient=True)

    def _sweep(self, block: Block, value: bool, gradient: bool) -> None:
        rows, cols, parameters = block.rows, block.cols, block.parameters
        store = gradient and (rows.grad is not None or cols.grad is not None)
        padded = self.padded(block, "sigmoid", store)
        area = self.tuning.partial_bytes // 4 * padded.tiles.rows * padded.tiles.cols
        scores = padded.score_gradients() if gradient else torch.empty(0, 0, device=padded.device)
        stored = padded.described(scores, padded.tiles.rows, padded.tiles.cols // 4) if gradient else scores
        totals = torch.zeros(3, dtype=torch.float64, device=padded.device)
        with padded.accumulating(parameters.scale, rows.grad, cols.grad) as gradient_scale:
            for panel in padded.panels(*(scores.shape if gradient else padded.panel_shape(area))):
                count, numbers = padded.grid(panel), (parameters.scale, parameters.bias, gradient_scale)
                lines = count * (padded.tiles.rows if padded.tiles.gluon else 1)
                sums = torch.zeros(
                    3, triton.cdiv(lines, 4) * 4, device=padded.device
                )  # each aligned: no other variant is compiled
                if padded.tiles.gluon:
                    padded.launch_gluon("gluon_sigmoid_kernel", panel, *numbers, *sums, scores=scores)
                else:
                    padded.launch(
                        sigmoid_kernel, panel, count, *numbers, *panel.keys, stored, *sums, *panel.sizes, scores.stride(0),
                        panel.positive, VALUE=value, GRADIENT=gradient, STORE=store,
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
    objective: Objective, fp32_precision: str, tuning: Tuning, machine: Machine, kept: Kept | None = None
) -> TritonSoftmax | TritonSigmoid:
    """The backend with the kernels of an objective."""
    kind = TritonSigmoid if isinstance(objective, Sigmoid) else TritonSoftmax
    return kind(objective, fp32_precision, tuning, machine, kept)
