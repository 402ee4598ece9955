"""Exact search: every row is compared, tile by tile, so that memory does not grow with the set.

n: rows of a tile, D: feature width, k: results.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

TILE = 1 << 14
"""Rows compared at once: 32 MiB of 512 float32 numbers."""


def nearest(parts: Iterable[np.ndarray], query_D: Tensor, count: int) -> list[tuple[int, float]]:
    """The k = `count` rows with the largest dot products, and these, best first; of equal ones the first row.

    Rows with a NaN are left out.

    parts: arrays (n, D) of any float type, often mapped from files; their rows are numbered through.
    """
    scores, rows = query_D.new_empty(0), torch.empty(0, dtype=torch.int64, device=query_D.device)
    first, space = 0, query_D.new_empty(TILE, len(query_D))  # allocating it for each tile takes longer than the product
    for part in parts:
        for start in range(0, len(part), TILE):
            stored = torch.from_numpy(np.array(part[start : start + TILE]))
            tile = space[: len(stored)].copy_(stored)
            found = (tile @ query_D).nan_to_num(nan=-torch.inf)
            numbers = torch.arange(first + start, first + start + len(tile), device=query_D.device)
            scores, rows = torch.cat([scores, found]), torch.cat([rows, numbers])
            kept = scores.argsort(descending=True, stable=True)[:count]
            scores, rows = scores[kept], rows[kept]
        first += len(part)
    return [(row, score) for row, score in zip(rows.tolist(), scores.tolist()) if score > -torch.inf]
