"""Exact search in what `clipscale embed` has written, with its model, and the pictures of its shards.

D: feature width.
"""

import io
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from clipscale.common.errors import UserError
from clipscale.common.record import Record
from clipscale.config.data import DataConfig
from clipscale.config.eval import existing_run
from clipscale.data.decode import IMAGE_TYPES, broken_pictures, image_bytes, open_picture
from clipscale.data.sample import BrokenSampleError, limits
from clipscale.data.shards.addresses import is_local
from clipscale.data.shards.counts import count_samples
from clipscale.data.shards.reader import ReadProblem, read_shard
from clipscale.data.shards.store import Store
from clipscale.distributed.world import join
from clipscale.models.towers import load_any
from clipscale.step.precision import Precision
from clipscale.tools.embed.arrays import EmbeddedSet
from clipscale.tools.explore.settings import ExploreConfig

TILE = 1 << 12
"""Rows compared at once: 8 MiB of 512 float32 numbers."""
SIDE = 320  # pixels of the longer side of a picture on the page


def nearest(parts: Iterable[np.ndarray], query_D: Tensor, count: int) -> list[tuple[int, float]]:
    """The `count` rows with the largest dot products, and these, best first. Rows of NaN are left out.

    parts: arrays (rows, D) of any float type; their rows are numbered through.
    """
    tiles = [part[start : start + TILE] for part in parts for start in range(0, len(part), TILE)]
    products = [torch.from_numpy(np.array(tile)).to(query_D) @ query_D for tile in tiles]
    scores = torch.cat([query_D.new_empty(0), *products]).nan_to_num(nan=-torch.inf)
    best = scores.topk(min(count, len(scores)))
    return [(row, score) for row, score in zip(best.indices.tolist(), best.values.tolist()) if score > -torch.inf]


class SearchModel:
    """A model and its set. Queries come from several threads, and the model takes one at a time."""

    def __init__(self, config: ExploreConfig, embedded: EmbeddedSet) -> None:
        """The model that the settings name. Raises UserError if the set has features of another one."""
        world = join(config.device)
        folder = existing_run(config.run) if config.run else None
        self.model, _, step = load_any(folder, config.checkpoint, config.weights, config.model, world.on_main)
        self.title = f"{folder.name}, step {step}" if folder else str(config.model.weights)
        self.transform = replace(self.model.eval_transform(), max_pixels=config.data.max_pixels)
        expected = {
            "weights": self.model.image.digest(),
            "text": self.model.text.digest(),
            "image_size": self.model.image_size,
            "resize": self.model.pixels.resize_mode,
        }
        if any(embedded.note.get(name, value) != value for name, value in expected.items()):
            raise UserError(f"data={embedded.folder}: has no features of {self.title}; embed the set with that model")
        self.embedded = embedded
        self.device = world.device
        self.lock = threading.RLock()
        self.precision = Precision(config.precision, world.device)
        for tower in (self.model.image, self.model.text):
            tower.to(world.device)

    def encode_texts(self, texts: list[str]) -> Tensor:
        """Unit features (texts, D)."""
        return self._encode(self.model.text, self.model.tokenizer(texts))

    def encode_image(self, data: bytes) -> Tensor:
        """The unit feature (D,) of an encoded picture. Raises BrokenSampleError."""
        with self.lock:  # one at a time: a large picture takes 268 MB
            return self._encode(self.model.image, torch.from_numpy(self.transform(data))[None])[0]

    def _encode(self, tower: nn.Module, inputs: Tensor) -> Tensor:
        with self.lock, torch.no_grad(), self.precision.autocast():
            return F.normalize(tower(inputs.to(self.device)).float(), dim=-1)

    def matches(self, query_D: Tensor, kind: str, count: int) -> list[Record]:
        """The samples whose feature of that kind is nearest to a query, with their similarity, best first."""
        rows = nearest(self.embedded.features(kind), query_D, count)
        return [{**self.embedded.sample(row), "score": score} for row, score in rows]


class Pictures:
    """The pictures of an embedded set, by the name of their part and their row."""

    def __init__(self, sources: Mapping[str, str], data: DataConfig) -> None:
        """`sources`: the shard of each part."""
        self.sources = sources
        self.data = data
        self.decoding = threading.Semaphore(2)  # a large picture takes 268 MB
        self.small = lru_cache(2048)(self._small)  # about 20 kB each
        self.index = lru_cache(None)(lambda url: count_samples([url]) if is_local(url) else None)

    def encoded(self, part: str, row: int) -> bytes:
        """A picture's bytes. Raises BrokenSampleError, also for no such sample and an unreadable shard."""
        problem = ReadProblem()
        members = limits(IMAGE_TYPES, (), self.data.max_bytes)
        url = self.sources.get(part)
        if url:
            self.index(url)
            store = Store(self.data)
            for raw in read_shard(url, problem, lambda number: number == row, members, store=store, indexed=True):
                if raw.index == row:
                    if raw.damage:
                        raise BrokenSampleError(raw.damage, raw.detail)
                    return image_bytes(raw.members)
        raise BrokenSampleError(problem.reason or "no_such_sample", problem.detail or f"{part}, row {row}")

    def _small(self, part: str, row: int) -> bytes:
        """The picture as a JPEG of at most SIDE x SIDE pixels. Raises BrokenSampleError."""
        data = self.encoded(part, row)
        out = io.BytesIO()
        with self.decoding, broken_pictures():
            image = open_picture(data, self.data.max_pixels)
            image.draft("RGB", (2 * SIDE, 2 * SIDE))
            image = image.convert("RGB")
            image.thumbnail((SIDE, SIDE), Image.Resampling.BICUBIC)
            image.save(out, "JPEG", quality=88)
        return out.getvalue()
