"""The distillation's tile, made of softmax tiles: the student's, and each teacher's.

    dL/dx_ij = a_i (e^(x_ij - r_i) - P_ij) + b_j (e^(x_ij - c_j) - Q_ij)

Letters: n rows (images) and m columns (texts) of the tile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clipscale.loss.block import Block
from clipscale.loss.similarity import product
from clipscale.loss.softmax.tile import SoftmaxTile


class DistillationTile(SoftmaxTile):
    """`forward` collects the student's and the teachers' log-sum-exps; `backward` also finds the value."""

    def __init__(self, teachers: Sequence[tuple[int, float]]) -> None:
        """teachers: the feature width and the logit scale of each."""
        self.teachers = teachers

    def forward(self, scores: Tensor, tile: Block, bound: float, spare: Tensor) -> None:
        super().forward(scores, replace(tile, positive=None), bound, spare)
        for y, y_tile, y_bound in self._teachers(tile, scores):
            super().forward(y, y_tile, y_bound, spare)

    def backward(self, scores: Tensor, tile: Block, bound: float, spare: Tensor) -> Tensor:
        targets = torch.zeros_like(scores)
        for y, y_tile, y_bound in self._teachers(tile, scores):
            targets += super().backward(y, y_tile, y_bound, spare)
        if tile.rows.target is not None:
            tile.rows.target += (targets * scores).sum(1)
        return super().backward(scores, replace(tile, positive=None), bound, spare).sub_(targets)

    def _teachers(self, tile: Block, like: Tensor) -> Iterator[tuple[Tensor, Block, float]]:
        """Each teacher's scores (n, m), the tile as it sees it, without positives, and a bound of |scores|."""
        widths = [width for width, _ in self.teachers]
        for number, (_, scale) in enumerate(self.teachers, 1):
            sides, features = [], []
            for side in (tile.rows, tile.cols):
                assert side.extra is not None
                features.append(side.extra.split(widths, 1)[number - 1])
                weight = None if side.weight is None else side.weight / len(self.teachers)
                lse = None if side.lse is None else side.lse[:, number : number + 1]
                sides.append(replace(side, lse=lse, weight=weight))
            y = product(features[0], features[1].T, torch.empty_like(like), scale)
            yield y, Block(sides[0], sides[1], tile.parameters, None), float(y.abs().max())
