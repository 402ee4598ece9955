"""Exponentials of scores that the forward pass keeps for the backward pass, which then needs no scores: three matmul units instead of four.

They are kept in bfloat16 for features in half precision, whose relative error is that of a probability, and else in the type of the sums.

Letters: n rows and m columns of a visit.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from clipscale.common.units import parse_memory
from clipscale.loss.block import Block
from clipscale.loss.machine import Machine

AUTO_SHARE = 0.5  # of the free memory of a GPU, for `auto`; the rest is for gradients and panels


@dataclass
class Exponentials:
    """Of the first k rows of a visit against all its columns."""

    values: Tensor  # (k, m) e^(x - t); the Triton backend's are whole tiles, 2^(y - R_i) in units of log 2
    per_row: Tensor  # (k,) those of the positives, unrounded; the Triton backend's references R_i
    reference: float = 0.0  # t


@dataclass
class Kept:
    """What one call keeps, while the bytes last.

    Positives are not rounded: late in training their probabilities are near 1, and what they lack is the gradient. Of no use to a second
    backward pass: the first one frees it, visit by visit.
    """

    budget: float = 0.0  # bytes
    visits: dict[int, Exponentials] = field(default_factory=dict)

    def open(self, visit: int, rows: int, cols: int, step: int, features: Tensor) -> Exponentials | None:
        """Memory for as many rows of a visit as fit, in whole steps or all of them; None: for none."""
        dtype = torch.bfloat16 if features.itemsize == 2 else features.dtype
        k = min(rows, int(self.budget // (cols * dtype.itemsize)) // step * step)
        if not k:
            return None
        values = torch.empty(k, cols, dtype=dtype, device=features.device)
        self.budget -= values.nbytes
        wide = torch.promote_types(features.dtype, torch.float32)
        self.visits[visit] = Exponentials(values, torch.empty(k, dtype=wide, device=features.device))
        return self.visits[visit]

    def add(self, exponentials: Tensor, reference: float, tile: Block, visit: Block) -> None:
        """Take in the tile of a visit. The tiles of a visit, of which (0, 0) is the first and highest, have the same t."""
        number, row, col = tile.at
        height = len(tile.rows)
        if row == col == 0:
            self.open(number, len(visit.rows), len(visit.cols), height, tile.rows.features)
        kept = self.visits.get(number)
        if kept is None or row + height > len(kept.values):
            return
        kept.reference = reference
        kept.values[row : row + height, col : col + len(tile.cols)] = exponentials
        diagonal = tile.diagonal()
        if diagonal is not None:
            kept.per_row[row:][diagonal[0]] = exponentials.diagonal(tile.offset)

    def take(self, tile: Block, out: Tensor) -> float | None:
        """Write the tile's exponentials to `out` (n, m) and return t; None: they are not kept."""
        number, row, col = tile.at
        end, right = row + len(tile.rows), col + len(tile.cols)
        kept = self.visits.get(number)
        if kept is None or end > len(kept.values):
            return None
        out.copy_(kept.values[row:end, col:right])
        diagonal = tile.diagonal()
        if diagonal is not None:
            out.diagonal(tile.offset).copy_(kept.per_row[row:][diagonal[0]])
        if (end, right) == kept.values.shape:
            del self.visits[number]
        return kept.reference


def kept_bytes(setting: str, machine: Machine, device: torch.device) -> float:
    """`loss.keep` in bytes. Raises ValueError."""
    fixed = parse_memory("keep", setting)
    return AUTO_SHARE * machine.free_bytes(device) if fixed is None else float(fixed)
