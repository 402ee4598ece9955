"""Where image rows wait between the two passes (offload=host|disk|encoded): how a sample is put there, and how it comes back.

`host` keeps pixels. `disk` keeps pixels in a file, read back chunk by chunk. `encoded` keeps the picture's own bytes with the crop that was
drawn, and decodes chunk by chunk, for each pass anew: the same bytes and the same crop give the same pixels. `device` keeps them too, and
device.py decodes.

C: channels, S: side in pixels.
"""

import os
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from clipscale.data.decode import Crop, Picture, TrainTransform
from clipscale.data.loader.host_batch import Arena, Slot
from clipscale.data.order import CounterRNG
from clipscale.errors import UserError


class Transform(Protocol):
    """Bytes from the shard to an image row, written to `out`; raises BrokenSampleError before anything is written."""

    def __call__(self, data: bytes, rng: CounterRNG, out: np.ndarray) -> None: ...


class Tier(Protocol):
    """One process's access to the image rows of an arena."""

    def begin(self, slot: Slot) -> None:
        """A new batch is about to be put into the slot by this process."""

    def put(self, slot: Slot, place: int, data: bytes, rng: CounterRNG) -> None:
        """Keep one sample. Raises BrokenSampleError before anything is written, UserError where there is no room."""

    def load(self, slot: Slot, start: int, out: np.ndarray) -> None:
        """The image rows from `start` on, as many as `out` has. Raises UserError where they cannot be read."""


def tier_of(arena: Arena, transform: Transform, share: tuple[int, int]) -> Tier:
    """The arena's tier, for a process that fills its places share[0]..share[1], counted over all processes of the rank."""
    if arena.layout.tier == "disk":
        return DiskTier(arena, transform)
    if arena.layout.encoded:
        assert isinstance(transform, TrainTransform)
        return (DeviceTier if arena.layout.tier == "device" else EncodedTier)(arena, transform, share)
    return HostTier(transform)


class HostTier:
    """Image rows in shared memory."""

    def __init__(self, transform: Transform) -> None:
        self._transform = transform

    def begin(self, slot: Slot) -> None:
        pass

    def put(self, slot: Slot, place: int, data: bytes, rng: CounterRNG) -> None:
        self._transform(data, rng, slot["rows"][place])

    def load(self, slot: Slot, start: int, out: np.ndarray) -> None:
        np.copyto(out, slot["rows"][start : start + len(out)])


class DiskTier:
    """Image rows in the arena's file, slot after slot."""

    def __init__(self, arena: Arena, transform: Transform) -> None:
        self._layout, self._file, self._transform = arena.layout, arena.file, transform
        self._row = np.empty(arena.layout.row, arena.layout.dtype)

    def _offset(self, slot: Slot, place: int) -> int:
        return (slot.number * self._layout.samples + place) * self._layout.row_bytes

    def begin(self, slot: Slot) -> None:
        pass

    def put(self, slot: Slot, place: int, data: bytes, rng: CounterRNG) -> None:
        self._transform(data, rng, self._row)
        self._transfer(os.pwrite, "written", self._row.data.cast("B"), self._offset(slot, place))

    def load(self, slot: Slot, start: int, out: np.ndarray) -> None:
        def read(fd: int, rest: memoryview, offset: int) -> int:
            return os.preadv(fd, [rest], offset)

        self._transfer(read, "read", out.data.cast("B"), self._offset(slot, start))

    def _transfer(self, call: Callable[[int, memoryview, int], int], done: str, block: memoryview, offset: int) -> None:
        moved = 0
        while moved < len(block):
            try:
                count = call(self._file, block[moved:], offset + moved)
            except OSError as error:
                raise self._failure(done, error.strerror or str(error)) from error
            if not count:
                raise self._failure(done, "the file ends early")
            moved += count

    def _failure(self, done: str, why: str) -> UserError:
        return UserError(
            f"offload_dir={self._layout.folder}: the batch cannot be {done} there ({why}); checkpoints are intact: make room or mend the "
            "disk and resume, with another offload_dir or offload=encoded"
        )


GREY = 128
"""Of a picture that turned out to be broken when its place had been given."""


class Recipe(NamedTuple):
    """How a picture in the pool becomes an image row, its crop aside."""

    begin: int
    """Where its bytes, or its pixels, begin; -1: neither is of use, and the row is grey."""
    size: int
    """Bytes; 0: pixels."""
    area: int = 0
    """Pixels of the whole picture, where the device decodes it."""
    orientation: int = 0
    """How it has to be turned, where the device decodes it, else 0."""


class EncodedTier:
    """Pictures as they came from the shard, one behind the other in this process's stretch of the slot's pool, and their crops.

    A picture whose bytes are more than its pixels is kept as pixels, so the pool need never be larger than these. Only as much of it as
    the fullest batch has needed is ever memory.
    """

    def __init__(self, arena: Arena, transform: TrainTransform, share: tuple[int, int]) -> None:
        self._layout, self._transform = arena.layout, transform
        self._first, self._stop = (part * arena.layout.pool // arena.layout.samples for part in share)
        self._end = self._first
        self._row = np.empty(arena.layout.row, arena.layout.dtype)

    def begin(self, slot: Slot) -> None:
        self._end = self._first

    def put(self, slot: Slot, place: int, data: bytes, rng: CounterRNG) -> None:
        # decoded already, so that a broken picture is passed over here, as it is in the other tiers
        picture = Picture(data, self._transform.max_pixels)
        crop = self._transform.crop(picture, rng)
        cut = self._transform.cut(picture, crop)
        if len(data) < self._layout.row_bytes:
            self._keep(slot, place, data, Recipe(self._end, len(data)), crop)
        else:
            self._keep_pixels(slot, place, cut, crop)

    def _keep_pixels(self, slot: Slot, place: int, cut: np.ndarray, crop: Crop) -> None:
        self._transform.render(cut, crop, self._row)
        self._keep(slot, place, self._row.data.cast("B"), Recipe(self._end, 0), crop)

    def _keep(self, slot: Slot, place: int, kept: bytes | memoryview, recipe: Recipe, crop: Crop) -> None:
        if self._end + len(kept) > self._stop:
            others = "offload=disk, " if self._layout.tier == "encoded" else ""
            raise UserError(
                f"{self._layout.setting}: the pictures of a batch are larger than foreseen and need more than the "
                f"{self._layout.pool / 2**30:.2f} GiB that are free for them; take {others}data.buffers=1 or a smaller batch"
            )
        slot["pool"][self._end : self._end + len(kept)] = np.frombuffer(kept, np.uint8)
        slot["recipes"][place] = (*recipe, *crop)
        self._end += len(kept)

    def load(self, slot: Slot, start: int, out: np.ndarray) -> None:
        for row, numbers in zip(out, slot["recipes"][start : start + len(out)].tolist()):
            restore(slot, Recipe(*numbers[:4]), Crop(*numbers[4:]), self._transform, row)


def restore(slot: Slot, recipe: Recipe, crop: Crop, transform: TrainTransform, row: np.ndarray) -> None:
    """The image row, (C, S, S) uint8, of a picture that is kept in the slot. Raises BrokenSampleError before anything is written."""
    kept = slot["pool"][recipe.begin : recipe.begin + (recipe.size or row.nbytes)]
    if recipe.begin < 0:
        row[:] = GREY
    elif recipe.size:
        picture = Picture(kept.tobytes(), transform.max_pixels)
        transform.render(transform.cut(picture, crop), crop, row)
    else:
        row.reshape(-1)[:] = kept


class DeviceTier(EncodedTier):
    """The same for the device's decoder: here only the header is read and the crop drawn, and what the device cannot decode is decoded.

    Bytes that are more than pixels are kept too, as long as there is room for the pixels of all places that are still to be filled.
    """

    def __init__(self, arena: Arena, transform: TrainTransform, share: tuple[int, int]) -> None:
        super().__init__(arena, transform, share)
        self._places = self._left = share[1] - share[0]

    def begin(self, slot: Slot) -> None:
        super().begin(slot)
        self._left = self._places

    def put(self, slot: Slot, place: int, data: bytes, rng: CounterRNG) -> None:
        picture = Picture(data, self._transform.max_pixels)
        crop = self._transform.crop(picture, rng)
        row = self._layout.row_bytes
        room = self._stop - self._end - (self._left - 1) * row
        if len(data) < max(row, room) and picture.fits_device(crop, self._transform.side):
            recipe = Recipe(self._end, len(data), picture.width * picture.height, picture.orientation)
            self._keep(slot, place, data, recipe, crop)
        else:
            self._keep_pixels(slot, place, self._transform.cut(picture, crop), crop)
        self._left -= 1


Begin = Callable[[Slot, int, int, int], Callable[[], None]]
"""Starts to make rows start..stop of a slot ready in a buffer; what it returns blocks until they are."""


class Prefetcher:
    """Image rows of a few chunks in host memory. Loads the next expected range while the last one is in use.

    `expect` names the ranges that will be asked for, in order. Without it, or after a request outside it, nothing is loaded ahead.
    """

    def __init__(self, buffers: np.ndarray, begin: Begin, *, copy: bool) -> None:
        """`copy`: hand out copies, for callers that keep a range longer than the two that follow it."""
        self._buffers, self._begin, self._copy = buffers, begin, copy
        self._given = -1
        self._pending: list[Callable[[], None] | None] = [None] * len(buffers)
        self._holds: list[tuple[int, int] | None] = [None] * len(buffers)
        self._slot: Slot | None = None
        self.expect(())

    def open(self, slot: Slot) -> None:
        """Continue with another batch."""
        self.drain()
        self._slot = slot
        self.expect(())

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """The ranges of the current batch that will be asked for, in order. Each is taken from the iterable just before it is loaded."""
        self._ranges = iter(ranges)
        self._next = next(self._ranges, None)

    def drain(self) -> None:
        """Wait for all loads under way, and forget what the buffers hold."""
        for buffer in range(len(self._buffers)):
            self._wait(buffer)
            self._holds[buffer] = None

    def rows(self, start: int, stop: int, arrived: int) -> Tensor:
        """Rows start..stop; rows 0..arrived of the batch, at least these, have arrived. The tensor holds until the call after the next."""
        capacity = self._buffers.shape[1]
        if stop - start > capacity:
            pieces = range(start, stop, capacity)
            return torch.cat([self.rows(at, min(at + capacity, stop), arrived).clone() for at in pieces])
        if self._next == (start, stop):
            self._next = next(self._ranges, None)
        else:
            self.expect(())
        if self._given < 0 or self._holds[self._given] != (start, stop):
            self._given = self._start((start, stop), self._given + 1)
        self._wait(self._given)
        if self._next and self._next[1] <= arrived and self._next != (start, stop):
            self._start(self._next, self._given + 1)
        rows = torch.from_numpy(self._buffers[self._given, : stop - start])
        return rows.clone() if self._copy else rows

    def _start(self, span: tuple[int, int], buffer: int) -> int:
        """Start to load the rows into the buffer (counted around) unless it holds them; returns its number."""
        assert self._slot is not None
        buffer %= len(self._buffers)
        if self._holds[buffer] != span:
            self._wait(buffer)
            self._holds[buffer] = span
            self._pending[buffer] = self._begin(self._slot, *span, buffer)
        return buffer

    def _wait(self, buffer: int) -> None:
        pending, self._pending[buffer] = self._pending[buffer], None
        if pending:
            pending()
