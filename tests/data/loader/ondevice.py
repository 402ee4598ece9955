"""Pictures as a worker leaves them for the device's decoder."""

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from PIL import Image

from clipscale.bench.data_work import photograph
from clipscale.data.decode import TrainTransform
from clipscale.data.loader.gpu_decode import DeviceDecoder
from clipscale.data.loader.host_batch import Arena, Layout, Slot
from clipscale.data.loader.offload import Recipe, open_backend
from clipscale.data.order import CounterRNG

SIDE = 24
SQUARE = TrainTransform(SIDE, (1.0, 1.0), (1.0, 1.0), 0.0, 10_000_000)
ROW = 3 * SIDE**2
"""Bytes of the pixels of one picture."""
CROPPED = replace(SQUARE, scale=(0.05, 1.0), ratio=(0.5, 2.0), flip=0.5)


def jpeg(data: bytes, **options: Any) -> bytes:
    """The picture again, as another JPEG."""
    out = io.BytesIO()
    Image.open(io.BytesIO(data)).save(out, "JPEG", **{"quality": 92, **options})
    return out.getvalue()


def turned(data: bytes, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return jpeg(data, exif=exif)


class Kept:
    """Pictures in a slot, as a worker leaves them."""

    def __init__(self, files: list[bytes], transform: TrainTransform, *, pool: int | None = None) -> None:
        self.files, self.transform = files, transform
        side = transform.side
        size = sum(map(len, files)) + len(files) * 3 * side**2 if pool is None else pool
        self.arena = Arena(Layout(1, len(files), (3, side, side), 8, backend="device", pool=size))
        self.slot: Slot = self.arena.slots[0]
        backend = open_backend(self.arena, transform, (0, len(files)))
        backend.begin(self.slot)
        for place, data in enumerate(files):
            backend.put(self.slot, place, data, CounterRNG(place))
        self.counts = Counter[str]()

    def recipes(self) -> list[Recipe]:
        return [Recipe(*numbers[:4]) for numbers in self.slot["recipes"].tolist()]

    def rows(self, decoder: Any, start: int = 0, stop: int | None = None) -> torch.Tensor:
        decode = DeviceDecoder(self.transform, decoder, self.counts)
        return decode(self.slot, start, len(self.files) if stop is None else stop).cpu()

    def exact(self) -> torch.Tensor:
        """The pixels of data.decode=exact."""
        out = np.empty((len(self.files), 3, self.transform.side, self.transform.side), np.uint8)
        for place, data in enumerate(self.files):
            self.transform(data, CounterRNG(place), out[place])
        return torch.from_numpy(out)


def distance(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """Mean difference of each picture, in units of 1/255."""
    return (a.float() - b.float()).abs().mean((1, 2, 3)).tolist()


def photographs(count: int, side: int = 160) -> list[bytes]:
    """Synthetic pictures with the spectrum of photographs."""
    return [photograph(side, seed) for seed in range(count)]


def portraits(count: int, side: int, **options: Any) -> list[bytes]:
    """Crops of matplotlib's sample photograph, whose colours are as smooth as a camera's."""
    with Image.open(Path(mpl.get_data_path()) / "sample_data/grace_hopper.jpg") as image:
        whole = image.convert("RGB")
    found = []
    for i in range(count):
        out = io.BytesIO()
        cut = whole.crop((0, 4 * i, 512, 4 * i + 512)).resize((side, side), Image.Resampling.LANCZOS)
        cut.save(out, "JPEG", **{"quality": 92, **options})
        found.append(out.getvalue())
    return found


def damaged(data: bytes) -> bytes:
    """A JPEG with intact header and end, but broken decoding tables."""
    start = data.index(b"\xff\xc4")
    return data[: start + 5] + bytes([255]) * 16 + data[start + 21 :]
