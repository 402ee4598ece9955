"""Exact search in the features of a set, and the pictures in its shards.

D: feature width, n: rows of a tile.
"""

import io
import threading
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clipscale.config.data import DataConfig
from clipscale.data.decode import IMAGE_TYPES, broken_pictures, image_bytes, open_picture
from clipscale.data.sample import BrokenSampleError, limits
from clipscale.data.shards.addresses import is_local
from clipscale.data.shards.counts import scan_counts
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store

TILE = 1 << 14
"""Rows compared at once: 32 MiB of 512 float32 numbers."""
SIDE = 320  # pixels of the longer side of a picture on the page


def nearest(parts: Iterable[np.ndarray], query_D: Tensor, count: int) -> list[tuple[int, float]]:
    """The `count` rows with the largest dot products, and these, best first; of equal ones the first row.

    Rows of NaN are left out. parts: arrays (rows, D) of any float type; their rows are numbered through.
    """
    scores, rows = query_D.new_empty(0), torch.empty(0, dtype=torch.int64, device=query_D.device)
    first, space = 0, query_D.new_empty(TILE, len(query_D))  # allocating it for each tile takes longer than the product
    for part in parts:
        for start in range(0, len(part), TILE):
            stored = torch.from_numpy(np.array(part[start : start + TILE]))
            tile_nD = space[: len(stored)].copy_(stored)
            scores = torch.cat([scores, (tile_nD @ query_D).nan_to_num(nan=-torch.inf)])
            rows = torch.cat([rows, torch.arange(first + start, first + start + len(stored), device=query_D.device)])
            best = scores.argsort(descending=True, stable=True)[:count]
            scores, rows = scores[best], rows[best]
        first += len(part)
    return [(row, score) for row, score in zip(rows.tolist(), scores.tolist()) if score > -torch.inf]


class Pictures:
    """The pictures of embedded sets, by the name of their part and their row."""

    def __init__(self, sources: Mapping[str, str], data: DataConfig) -> None:
        """`sources`: the shard of each part."""
        self.sources, self.data = sources, data
        self.decoding = threading.Semaphore(2)  # a large picture takes 268 MB
        self.small = lru_cache(2048)(self._small)  # about 20 kB each
        self.index = lru_cache(None)(lambda url: scan_counts([url]) if is_local(url) else None)

    def encoded(self, part: str, row: int) -> bytes:
        """A picture's bytes. Raises BrokenSampleError, also for no such sample and an unreadable shard."""
        problem, members = ReadProblem(), limits(IMAGE_TYPES, (), self.data.max_bytes)
        if url := self.sources.get(part, ""):
            self.index(url)
            store = Store(self.data)
            for raw in read_shard(
                url, problem, lambda number: number == row, members, lazy=True, store=store, indexed=True
            ):
                if raw.index == row:
                    raw.load()
                    if raw.damage:
                        raise BrokenSampleError(raw.damage, raw.detail)
                    return image_bytes(raw.members)
        raise BrokenSampleError(problem.reason or "no_such_sample", problem.detail or f"{part}, row {row}")

    def _small(self, part: str, row: int) -> bytes:
        """The picture as a JPEG of at most SIDE x SIDE pixels. Raises BrokenSampleError."""
        data, out = self.encoded(part, row), io.BytesIO()
        with self.decoding, broken_pictures():
            image = open_picture(data, self.data.max_pixels)
            image.draft("RGB", (2 * SIDE, 2 * SIDE))
            image = image.convert("RGB")
            image.thumbnail((SIDE, SIDE), Image.Resampling.BICUBIC)
            image.save(out, "JPEG", quality=88)
        return out.getvalue()
