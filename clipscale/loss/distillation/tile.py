"""The distillation's tile: a softmax tile whose targets are computed, not read off the diagonal.

    N dL/dx_ij = a_i e^(x_ij - r_i) + b_j e^(x_ij - c_j) - W_ij,  W_ij = a_i P_ij + b_j Q_ij

Letters: n rows (images) and m columns (texts) of the tile; P and Q the targets of rows and columns; r and c the
log-sum-exps, a and b their weights.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from clipscale.loss.block import Block
from clipscale.loss.similarity import matmul_into
from clipscale.loss.softmax.tile import SoftmaxTileOps, positive_weights, weighted_probabilities


class TeacherSpec(NamedTuple):
    """A teacher's numbers. The features of all teachers are side by side, in `BlockSide.teacher_features`."""

    width: int
    # Its logit scale: the multiplier itself.
    scale: float


class DistillationTileOps(SoftmaxTileOps):
    """The distillation's two functions on a tile. They need the log-sum-exps of the teachers' scores, `teacher_lse`."""

    def __init__(self, teachers: Sequence[TeacherSpec], teacher_share: float) -> None:
        """`teacher_share`: the teachers' share of the targets."""
        self.teachers = teachers
        self.teacher_share = teacher_share

    def forward(self, scores: Tensor, tile: Block, bound: float, scratch: Tensor) -> None:
        if tile.rows.row_loss is not None:
            weights = self._target_weights(tile, scores)
            masked = tile.masked_pairs()
            counted = scores if masked is None else scores.masked_fill(masked, 0)
            tile.rows.row_loss -= (weights * counted).sum(1, dtype=torch.float64)
        super().forward(scores, replace(tile, positive_offset=None), bound, scratch)

    def backward(self, scores: Tensor, tile: Block, bound: float, scratch: Tensor) -> Tensor:
        weights = self._target_weights(tile, scores)
        return super().backward(scores, replace(tile, positive_offset=None), bound, scratch).sub_(weights)

    def _target_weights(self, tile: Block, like: Tensor) -> Tensor:
        """W (n, m), in the type of `like`."""
        weights = torch.zeros_like(like)
        masked = tile.masked_pairs()
        widths = [teacher.width for teacher in self.teachers]
        scores = torch.empty_like(like)
        for k, teacher in enumerate(self.teachers):
            images = _not_none(tile.rows.teacher_features).split(widths, 1)[k]
            texts = _not_none(tile.cols.teacher_features).split(widths, 1)[k]
            matmul_into(images, texts.T, scores, teacher.scale)
            if masked is not None:
                scores.masked_fill_(masked, -torch.inf)
            for side, dim in ((tile.rows, 1), (tile.cols, 0)):
                if side.lse_weight is not None:
                    weight = side.lse_weight * (self.teacher_share / len(self.teachers))
                    lse = _not_none(side.teacher_lse)[:, k]
                    weights += weighted_probabilities(scores, weight, lse, dim)
        if self.teacher_share < 1:
            i, j = tile.positive_pairs()
            weights[i, j] += ((1 - self.teacher_share) * positive_weights(tile, i, j)).to(weights.dtype)
        return weights


def _not_none(x: Tensor | None) -> Tensor:
    """x, which `add_teachers` or `add_teacher_lses` has set."""
    assert x is not None
    return x
