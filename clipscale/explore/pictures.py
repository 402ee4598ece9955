"""Pictures of the shards, one at a time: the bytes for a query, a small JPEG for the page."""

import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

import numpy as np
from PIL import Image

from clipscale.config.data import DataConfig
from clipscale.data.decode import IMAGE_TYPES, broken_pictures, image_bytes, open_picture
from clipscale.data.sample import BrokenSampleError, limits
from clipscale.data.shards import index
from clipscale.data.shards.access import Opened, is_local
from clipscale.data.shards.listing import access_of
from clipscale.data.shards.reader import ReadProblem, ShardStatistics, read_shard
from clipscale.data.shards.store import Store

T = TypeVar("T")
SIDE = 320
"""Longest side of a picture on the page, in pixels."""
KEPT_PICTURES, KEPT_SHARDS = 2048, 1024
"""Small pictures of about 20 kB, and the offsets of shards of about 80 kB, in memory."""
DECODING = threading.Semaphore(2)
"""Pictures of the page and of queries that are decoded at once; a large one takes 268 MB."""


class LRUCache(Generic[T]):
    """The values that were used last, at most `most` of them. For several threads."""

    def __init__(self, most: int) -> None:
        self.most, self.lock = most, threading.Lock()
        self.values: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], T] | None = None) -> T:
        """The value of a key, computed if there is none. Raises KeyError for a key that cannot be computed."""
        with self.lock:
            if compute is None or key in self.values:
                self.values.move_to_end(key)
                return self.values[key]
        value = compute()
        with self.lock:
            self.values[key] = value
            if len(self.values) > self.most:
                self.values.popitem(last=False)
        return value


class Pictures:
    """The pictures of embedded sets, by the name of their part and their row."""

    def __init__(self, sources: Mapping[str, str], data: DataConfig) -> None:
        self.sources, self.data = dict(sources), data
        self.kinds = limits(IMAGE_TYPES, (), data.max_bytes)
        self.small: LRUCache[bytes] = LRUCache(KEPT_PICTURES)
        self.offsets: LRUCache[np.ndarray | None] = LRUCache(KEPT_SHARDS)

    def encoded(self, part: str, row: int) -> bytes:
        """A picture's bytes. Raises BrokenSampleError: also `no_such_sample` and the reasons of shards that cannot be read."""
        if part not in self.sources:
            raise BrokenSampleError("no_such_sample", part)
        problem, store = ReadProblem(), Store(access_of(self.data))
        wanted = read_shard(
            self.sources[part], problem, lambda n: n == row, self.kinds, lazy=True, store=store, offsets=self._offsets
        )
        for raw in wanted:
            if raw.index == row:
                raw.load()
                wanted.close()
                if raw.damage:
                    raise BrokenSampleError(raw.damage, raw.detail)
                return image_bytes(raw.members)
        raise BrokenSampleError(problem.reason or "no_such_sample", problem.detail or f"{part}, row {row}")

    def shown(self, part: str, row: int) -> bytes:
        """The picture as a JPEG of at most SIDE x SIDE pixels. Raises BrokenSampleError."""
        return self.small.get((part, row), lambda: self._small(self.encoded(part, row)))

    def _small(self, data: bytes) -> bytes:
        out = io.BytesIO()
        with DECODING, broken_pictures():
            image = open_picture(data, self.data.max_pixels)
            image.draft("RGB", (2 * SIDE, 2 * SIDE))
            image = image.convert("RGB")
            image.thumbnail((SIDE, SIDE), Image.Resampling.BICUBIC)
            image.save(out, "JPEG", quality=88)
        return out.getvalue()

    def _offsets(self, url: str, opened: Opened) -> np.ndarray | None:
        """Where a shard's samples begin: from its index, or, if it is a local tar, from its headers, which are read once."""

        def found() -> np.ndarray | None:
            indexed = index.sample_offsets(url, opened, self.data.cache)
            if indexed is not None or not is_local(url):
                return indexed
            problem, statistics, store = ReadProblem(), ShardStatistics(), Store(access_of(self.data))
            for _ in read_shard(url, problem, lambda _: False, {}, store=store, statistics=statistics):
                pass
            return None if problem.reason or statistics.packed else np.array(statistics.offsets)

        return self.offsets.get(url, found)
