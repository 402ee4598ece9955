"""How one sample's image row is stored in the batch until both passes have used it, and how it is loaded.

`host` stores pixels. `encoded` stores the picture's own bytes and the
crop that was drawn, and decodes them chunk by chunk, again for each pass: the same bytes and crop give the same pixels.

C: channels, S: side in pixels, D: width of stored features.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from clipscale.config.data import DataConfig
from clipscale.data.decode import IMAGE_TYPES, Colour, Crop, Picture, TrainTransform
from clipscale.data.features import StoredFeatures
from clipscale.data.loader.host_batch import Arena, Slot
from clipscale.data.order import CounterRNG

Transform = Callable[[bytes, CounterRNG, np.ndarray], None]
"""Writes the image row made of a member's bytes to an array; raises BrokenSampleError before anything is written."""


class RowKind(NamedTuple):
    """What an image row is, and how it is made."""

    transform: Transform
    members: tuple[str, ...]  # extensions of members; the first that a sample has goes to `transform`
    shape: tuple[int, ...]  # (C, S, S), or (D,)
    dtype: str


def row_kind(config: DataConfig, side: int, stored: StoredFeatures | None = None) -> RowKind:
    if stored:
        return RowKind(stored, (stored.member,), stored.shape, stored.dtype)
    return RowKind(train_transform(config, side), IMAGE_TYPES, (3, side, side), "uint8")


def train_transform(config: DataConfig, side: int) -> TrainTransform:
    augment = config.augment
    return TrainTransform(
        side,
        (augment.scale[0], augment.scale[1]),
        (augment.ratio[0], augment.ratio[1]),
        augment.flip,
        config.max_pixels,
        fast=config.decode == "fast",
        colour=Colour(augment.jitter, augment.greyscale) if any(augment.jitter) or augment.greyscale else None,
    )


def open_backend(arena: Arena, transform: Transform) -> "PixelBackend":
    """One process's access to the image rows of an arena."""
    if arena.layout.backend == "encoded":
        assert isinstance(transform, TrainTransform)
        return EncodedBackend(arena, transform)
    return PixelBackend(arena, transform)


class PixelBackend:
    """Stores pixels (`host`)."""

    def __init__(self, arena: Arena, transform: Transform) -> None:
        self._transform = transform
        self._row = np.empty(arena.layout.row, arena.layout.dtype)

    def put(self, slot: Slot, place: int, data: bytes, rng: CounterRNG) -> None:
        """Store a sample. Raises BrokenSampleError before anything is written."""
        self._transform(data, rng, slot["rows"][place])

    def check(self, data: bytes, rng: CounterRNG) -> None:
        """Raise BrokenSampleError where `put` does, but store nothing."""
        self._transform(data, rng, self._row)

    def load(self, slot: Slot, start: int, out: np.ndarray) -> None:
        np.copyto(out, slot["rows"][start : start + len(out)])


class EncodedBackend(PixelBackend):
    """Stores pictures as their bytes, at the beginning of their rows: memory is used only where it is written to.

    A slot's `recipes` hold the number of a picture's bytes and its crop. A picture with more bytes than pixels is
    stored as pixels, with 0 for the number of bytes.
    """

    _transform: TrainTransform

    def put(self, slot: Slot, place: int, data: bytes, rng: CounterRNG) -> None:
        picture = Picture(data, self._transform.max_pixels)
        crop = self._transform.crop(picture, rng)
        # Decoded here already, so that a broken picture is skipped as with the other backends.
        decoded = picture.decode(crop.reduce)
        row, size = slot["rows"][place], len(data)
        if size < row.nbytes:
            row.reshape(-1)[:size] = np.frombuffer(data, np.uint8)
        else:
            self._transform.render(decoded, picture, crop, row)
            size = 0
        slot["recipes"][place] = (size, *crop)

    def load(self, slot: Slot, start: int, out: np.ndarray) -> None:
        rows, recipes = (slot[name][start : start + len(out)] for name in ("rows", "recipes"))
        for pixels, row, (size, *numbers) in zip(out, rows, recipes.tolist()):
            if size:
                picture, crop = Picture(row.reshape(-1)[:size].tobytes(), self._transform.max_pixels), Crop(*numbers)
                self._transform.render(picture.decode(crop.reduce), picture, crop, pixels)
            else:
                np.copyto(pixels, row)
