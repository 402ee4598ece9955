"""The offload backends: how an image row is stored in the batch until both passes have used it, and loaded.

`host` keeps pixels in memory. `disk` keeps pixels in a file, read back chunk by chunk. `encoded` keeps the picture's
own bytes and the crop that was drawn, and decodes chunk by chunk, again for each pass: the same bytes and crop give the
same pixels.

C: channels, S: side in pixels, D: width of stored features.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.data.decode import IMAGE_TYPES, Colour, Crop, Picture, TrainTransform
from clipscale.data.features import StoredFeatures
from clipscale.data.loader.host_batch import Arena, Slot
from clipscale.data.order import CounterRNG

JITTERED = 0.8
"""Share of the pictures whose colours `data.augment.jitter` changes, as in the papers that use it."""
Transform = Callable[[bytes, CounterRNG, np.ndarray], None]
"""Writes the image row made of a member's bytes to an array; raises BrokenSampleError before anything is written."""


class RowKind(NamedTuple):
    """What an image row is, and how it is made."""

    transform: Transform
    members: tuple[str, ...]  # extensions of members; the first that a sample has goes to `transform`
    shape: tuple[int, ...]  # (C, S, S), or (D,)
    dtype: str


def row_kind(config: DataConfig, side: int, stored: StoredFeatures | None = None) -> RowKind:
    """Stored features, or else pictures of `side` pixels."""
    if stored:
        return RowKind(stored, (stored.member,), (stored.width,), stored.dtype)
    return RowKind(train_transform(config, side), IMAGE_TYPES, (3, side, side), "uint8")


def train_transform(config: DataConfig, side: int) -> TrainTransform:
    """The training transform of the settings, from picture bytes to `side` pixels."""
    augment, jitters = config.augment, any(config.augment.jitter)
    colour = Colour(augment.jitter, JITTERED if jitters else 0.0, augment.greyscale)
    return TrainTransform(
        side,
        (augment.scale[0], augment.scale[1]),
        (augment.ratio[0], augment.ratio[1]),
        augment.flip,
        config.max_pixels,
        fast=config.decode == "fast",
        colour=colour if jitters or augment.greyscale else None,
    )


def open_backend(arena: Arena, transform: Transform, span: tuple[int, int]) -> "HostBackend":
    """The arena's backend, for a process that fills samples span[0]..span[1] of a batch, in order of processes."""
    if arena.layout.backend == "encoded":
        assert isinstance(transform, TrainTransform)
        return EncodedBackend(arena, transform, span)
    return (HostBackend if arena.layout.backend == "host" else DiskBackend)(arena, transform)


class HostBackend:
    """One process's access to the image rows of an arena. Here they lie in shared memory."""

    def __init__(self, arena: Arena, transform: Transform) -> None:
        self._layout, self._transform = arena.layout, transform
        self._row = np.empty(arena.layout.row, arena.layout.dtype)

    def begin(self, slot: Slot) -> None:
        """This process starts to fill the slot with a new batch."""

    def put(self, slot: Slot, place: int, data: bytes, rng: CounterRNG) -> None:
        """Store a sample. Raises BrokenSampleError before anything is written, UserError where there is no space."""
        self._transform(data, rng, slot["rows"][place])

    def check(self, data: bytes, rng: CounterRNG) -> None:
        """Raise BrokenSampleError where `put` does, but store nothing."""
        self._transform(data, rng, self._row)

    def load(self, slot: Slot, start: int, out: np.ndarray) -> None:
        """Write the image rows from `start` on to `out`, as many as it has. Raises UserError."""
        np.copyto(out, slot["rows"][start : start + len(out)])


class DiskBackend(HostBackend):
    """Keeps image rows in the arena's file, slot after slot."""

    def __init__(self, arena: Arena, transform: Transform) -> None:
        super().__init__(arena, transform)
        self._file = arena.file

    def put(self, slot: Slot, place: int, data: bytes, rng: CounterRNG) -> None:
        self._transform(data, rng, self._row)
        self._transfer(os.pwrite, "written", self._row, slot, place)

    def load(self, slot: Slot, start: int, out: np.ndarray) -> None:
        self._transfer(lambda fd, rest, offset: os.preadv(fd, [rest], offset), "read", out, slot, start)

    def _transfer(
        self, call: Callable[[int, memoryview, int], int], done: str, rows: np.ndarray, slot: Slot, place: int
    ) -> None:
        block, moved = rows.data.cast("B"), 0
        offset = (slot.number * self._layout.samples + place) * self._layout.row_bytes
        while moved < len(block):
            try:
                count = call(self._file, block[moved:], offset + moved)
                if not count:
                    raise OSError(0, "the file ends early")
            except OSError as error:
                raise UserError(
                    f"offload_dir={self._layout.offload.folder}: the batch cannot be {done} there ({error.strerror}); "
                    "checkpoints are intact: free some space or repair the disk and resume, with another offload_dir "
                    "or offload=encoded"
                ) from error
            moved += count


class EncodedBackend(HostBackend):
    """Keeps pictures as their bytes in this process's part of the slot's pool, one behind the other, and their crops.

    A slot's `recipes` say for each row where its bytes begin in the pool, how many there are, and the crop. A picture
    with more bytes than pixels is stored as pixels, with 0 for the number of bytes, so the pool never needs to be
    larger than these. Memory is used only as far as the fullest batch so far has needed.
    """

    _transform: TrainTransform

    def __init__(self, arena: Arena, transform: TrainTransform, span: tuple[int, int]) -> None:
        super().__init__(arena, transform)
        self._first, self._stop = (part * arena.layout.pool // arena.layout.samples for part in span)
        self._end = self._first

    def begin(self, slot: Slot) -> None:
        self._end = self._first

    def put(self, slot: Slot, place: int, data: bytes, rng: CounterRNG) -> None:
        picture = Picture(data, self._transform.max_pixels)
        crop = self._transform.crop(picture, rng)
        # Decoded here already, so that a broken picture is skipped as with the other backends.
        decoded = picture.decode(crop.reduce)
        size, stored = len(data), np.frombuffer(data, np.uint8)
        if size >= self._layout.row_bytes:
            self._transform.render(decoded, picture, crop, self._row)
            size, stored = 0, self._row.reshape(-1)
        if self._end + len(stored) > self._stop:
            raise UserError(
                "offload=encoded: the pictures of a batch are larger than expected and need more than the "
                f"{self._layout.pool / 2**30:.2f} GiB that are free for them; take offload=disk, data.buffers=1 or a "
                "smaller batch"
            )
        slot["pool"][self._end : self._end + len(stored)] = stored
        slot["recipes"][place] = (self._end, size, *crop)
        self._end += len(stored)

    def load(self, slot: Slot, start: int, out: np.ndarray) -> None:
        pool = slot["pool"]
        for row, (begin, size, *numbers) in zip(out, slot["recipes"][start : start + len(out)].tolist()):
            if size:
                picture, crop = (
                    Picture(pool[begin : begin + size].tobytes(), self._transform.max_pixels),
                    Crop(*numbers),
                )
                self._transform.render(picture.decode(crop.reduce), picture, crop, row)
            else:
                row.reshape(-1)[:] = pool[begin : begin + row.nbytes]
