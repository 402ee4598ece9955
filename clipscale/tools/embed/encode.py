"""Computes the features of a shard's samples, in groups whose size does not depend on the number of processes.

n: samples of a group, K: the two features of a sample, D: feature width, C: channels, S: pixels a side.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from clipscale.data.conditions import source_names
from clipscale.data.decode import first_caption, image_bytes
from clipscale.data.eval_transform import ahead
from clipscale.data.sample import BrokenSampleError, RawSample
from clipscale.models.towers import ClipModel
from clipscale.step.precision import Precision
from clipscale.tools.embed.settings import EmbedConfig

T = TypeVar("T")
THREADS = 4
"""That decode the pictures of a process."""
GROUP_BYTES = 128 << 20
"""Bytes of a group's samples, of which two are in memory at once: 128 pictures of a megabyte."""


@dataclass(frozen=True)
class Group:
    """Consecutive samples with their features."""

    raws: Sequence[RawSample]
    captions: Sequence[str | None]
    rows: np.ndarray
    """(n, K, D). A feature of a sample without a usable picture or text is NaN."""


class FeatureEncoder:
    """Computes unit features on one device."""

    def __init__(self, config: EmbedConfig, model: ClipModel, device: torch.device) -> None:
        self.config = config
        self.model = model
        self.device = device
        self.precision = Precision(config.precision, device)
        model.image.to(device)
        model.text.to(device)
        self.captions = source_names(config.data.captions)
        self.transform = replace(model.eval_transform(), max_pixels=config.data.max_pixels)

    def groups(self, raws: Iterable[RawSample]) -> Iterator[Group]:
        """All samples in their order. Threads decode the next group meanwhile."""
        with ThreadPoolExecutor(THREADS) as pool:
            for batch, pictures in ahead(pool, self.pixels, batches(raws, self.config.batch)):
                yield self.group(batch, pictures)

    def group(self, raws: list[RawSample], pictures: Sequence[np.ndarray | None]) -> Group:
        model = self.model
        captions = [self.caption(raw) for raw in raws]
        image = self.encode(pictures, lambda usable: model.image(torch.from_numpy(np.stack(usable)).to(self.device)))
        text = self.encode(captions, lambda usable: model.text(model.tokenizer(usable).to(self.device)))
        return Group(raws, captions, np.stack([image, text], 1))

    def encode(self, inputs: Sequence[T | None], tower: Callable[[list[T]], Tensor]) -> np.ndarray:
        """A feature row for every input, (n, D); NaN for None."""
        rows = np.full((len(inputs), self.model.width), np.nan, self.config.dtype)
        usable = [x for x in inputs if x is not None]
        if usable:
            with torch.inference_mode(), self.precision.autocast():
                rows[[x is not None for x in inputs]] = tower(usable).float().cpu().numpy().astype(self.config.dtype)
        return rows

    def pixels(self, raw: RawSample) -> np.ndarray | None:
        """(C, S, S) uint8; None for a picture that cannot be used."""
        with suppress(BrokenSampleError):
            return self.transform(image_bytes(raw.members))
        return None

    def caption(self, raw: RawSample) -> str | None:
        """The first of the sample's texts that can be used; None if there is none."""
        with suppress(BrokenSampleError):
            return first_caption(raw.members, self.captions)
        return None


def batches(raws: Iterable[RawSample], most: int) -> Iterator[list[RawSample]]:
    """Consecutive samples, at most `most` together, and no more once they have GROUP_BYTES."""
    batch: list[RawSample] = []
    size = 0
    for raw in raws:
        batch.append(raw)
        size += sum(map(len, raw.members.values()))
        if len(batch) == most or size >= GROUP_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch
