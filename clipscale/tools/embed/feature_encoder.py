"""Computes the features of a shard's samples, in groups of a size that does not depend on the number of processes.

n: samples of a group, K: the two features of a sample, D: feature width, C: channels, S: pixels a side.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from clipscale.config.conditions import source_names
from clipscale.config.data import DataConfig
from clipscale.data.eval_transform import EvalTransform, prefetched
from clipscale.data.picture import turned_upright
from clipscale.data.sample import BrokenSampleError, RawSample, first_caption, image_bytes
from clipscale.models.towers import ClipModel
from clipscale.step.precision import Precision

T = TypeVar("T")

# Threads that decode the pictures of a process.
THREADS = 4
# A group ends once its samples have this many bytes: 128 pictures of a megabyte. Two groups are in memory at once.
GROUP_BYTES = 128 << 20


@dataclass(frozen=True)
class Group:
    """Consecutive samples with their features."""

    raw_samples: Sequence[RawSample]
    captions: Sequence[str | None]
    # (n, K, D). A feature of a sample without a usable picture or text is NaN.
    rows: np.ndarray


@dataclass(frozen=True)
class FeatureEncoder:
    """Computes unit features on one device. `feature_encoder` makes it."""

    # The model, on the device.
    model: ClipModel
    device: torch.device
    precision: Precision
    # The names of the caption sources.
    captions: Sequence[str]
    transform: EvalTransform

    def groups(self, raw_samples: Iterable[RawSample], batch: int, dtype: str) -> Iterator[Group]:
        """All samples in their order, at most `batch` in a group. Threads decode the next group meanwhile."""
        with ThreadPool(THREADS) as pool:
            for group, pictures in prefetched(pool, self.pixels, batches(raw_samples, batch)):
                captions = [self.caption(raw) for raw in group]
                images = self.encode(self.model.image, lambda x: torch.from_numpy(np.stack(x)), pictures.get())
                texts = self.encode(self.model.text, self.model.tokenizer, captions)
                yield Group(group, captions, np.stack([images, texts], 1).astype(dtype))

    def encode(self, tower: nn.Module, prepare: Callable[[list[T]], Tensor], inputs: Sequence[T | None]) -> np.ndarray:
        """A float32 feature row (n, D) for each picture's pixels, or each text; NaN for None."""
        rows = np.full((len(inputs), self.model.embed_dim), np.nan, np.float32)
        usable = [x for x in inputs if x is not None]
        if usable:
            with torch.inference_mode(), self.precision.autocast():
                features = tower(prepare(usable).to(self.device))
            rows[[x is not None for x in inputs]] = features.float().cpu().numpy()
        return rows

    def pixels(self, raw: RawSample) -> np.ndarray | None:
        """(C, S, S) uint8, upright as in training; None for a picture that cannot be used."""
        with suppress(BrokenSampleError):
            return self.transform(turned_upright(image_bytes(raw.members)))
        return None

    def caption(self, raw: RawSample) -> str | None:
        """The first of the sample's texts that can be used, if any."""
        with suppress(BrokenSampleError):
            return first_caption(raw.members, self.captions)
        return None


def batches(raw_samples: Iterable[RawSample], most: int) -> Iterator[list[RawSample]]:
    """Groups of consecutive samples, each of at most `most`. A group also ends once it has GROUP_BYTES."""
    batch = []
    size = 0
    for raw in raw_samples:
        batch.append(raw)
        size += sum(map(len, raw.members.values()))
        if len(batch) == most or size >= GROUP_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def feature_encoder(model: ClipModel, device: torch.device, precision: str, data: DataConfig) -> FeatureEncoder:
    """An encoder with the model, which it moves to the device."""
    return FeatureEncoder(
        model=model.to(device),
        device=device,
        precision=Precision.set_up(precision, device),
        captions=source_names(data.captions),
        transform=model.eval_transform(),
    )
