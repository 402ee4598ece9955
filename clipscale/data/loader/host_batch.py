"""The local batch in host memory, allocated once. Workers share it and write each sample into its place.

Until both passes have used it, a picture waits as its pixels (`host`), or as its own bytes and the crop that was drawn
(`encoded`), which are decoded chunk by chunk, again for each pass: the same bytes and crop give the same pixels.

N: samples of the local batch, k: texts of each (captions, hard negatives), C: channels, S: side in pixels, T: tokens.
"""

import contextlib
import logging
import math
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clipscale.common.units import format_bytes
from clipscale.data.columns import Columns
from clipscale.data.decode import Crop, Picture
from clipscale.data.order import CounterRNG

log = logging.getLogger(__name__)

PAGE = 4096
BUFFERS = 3
"""Chunks in the buffers at once: the one computed on, the one being copied to the device, and the one being loaded."""
RECIPE = 6
"""Numbers for an encoded picture: how many bytes it has, and the five of its crop."""


class Part(NamedTuple):
    """An array in the arena."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Bytes, in whole pages."""
        return -(-math.prod(self.shape) * np.dtype(self.dtype).itemsize // PAGE) * PAGE


@dataclass(frozen=True)
class Offload:
    """Where image rows wait between the two passes, and whether a GPU takes them."""

    backend: str = "host"  # host or encoded
    chunk: int = 256  # encoded: rows decoded into host memory at once, the image tower's chunk
    gpu: bool = False
    """Whether rows are copied to a GPU: their host memory is page-locked, and held for a short time only."""


HOST = Offload()


@dataclass(frozen=True)
class Layout:
    """What one rank stores of its batches, and where."""

    slots: int  # local batches at once
    samples: int  # of the local batch
    columns: Columns
    texts: tuple[int, int]  # captions and hard negatives of a sample
    context_length: int
    offload: Offload = HOST

    @property
    def backend(self) -> str:
        return self.offload.backend

    @property
    def row_bytes(self) -> int:
        """Of a picture's pixels."""
        return math.prod(self.columns.images.shape)

    def slot_parts(self) -> dict[str, Part]:
        """The arrays of one slot in shared memory. Encoded pictures use the beginning of their rows."""
        parts = {
            "tokens": Part((self.samples * sum(self.texts), self.context_length), "int32"),
            "lengths": Part((self.samples * sum(self.texts),), "int16"),
            "rows": Part((self.samples, *self.columns.images.shape), "uint8"),
        }
        for column in self.columns.beside:
            parts[column.name] = Part((self.samples, *column.shape), column.dtype)
        if self.backend == "encoded":
            parts["recipes"] = Part((self.samples, RECIPE), "int64")
        return parts

    def text_rows(self, place: int) -> list[int]:
        """The rows of a sample's captions among the tokens, then of its negatives, which follow all captions."""
        captions, negatives = self.texts
        first = self.samples * captions + place * negatives
        return [*range(place * captions, (place + 1) * captions), *range(first, first + negatives)]

    @property
    def buffer_rows(self) -> int:
        return min(self.offload.chunk, self.samples)

    def buffers_part(self) -> Part:
        """The buffers into which rows are loaded, one behind the other; none for `host`."""
        buffers = 0 if self.backend == "host" else BUFFERS
        return Part((buffers * self.buffer_rows, *self.columns.images.shape), "uint8")

    def mapped_bytes(self) -> int:
        """Address space of all slots and buffers."""
        return self.slots * sum(part.size for part in self.slot_parts().values()) + self.buffers_part().size

    def memory_bytes(self, picture: float | None = None) -> int:
        """Host memory of slots and buffers. `picture`: mean bytes of encoded ones; None: unknown, as their pixels."""
        unused = 0.0
        if self.backend == "encoded" and picture is not None:
            unused = max(0.0, self.row_bytes - picture - PAGE)  # on average half a page at either end
        return self.mapped_bytes() - self.slots * int(self.samples * unused)


class Slot(dict[str, np.ndarray]):
    """One local batch: its arrays by name (see Layout.slot_parts), tokens (kN, T), of a column (N, ...)."""

    def __init__(self, number: int, parts: dict[str, np.ndarray]) -> None:
        super().__init__(parts)
        self.number = number


class Arena:
    """The memory of one rank's batches: anonymous memory that worker processes map too.

    Anonymous files (memfd) do not count against /dev/shm, which containers keep small.
    """

    def __init__(self, layout: Layout, fd: int | None = None) -> None:
        """`fd`: the file of another process's arena."""
        self.layout = layout
        if fd is None:
            fd = os.memfd_create("clipscale-batch")
            os.ftruncate(fd, layout.mapped_bytes())
        self._fd = fd
        self._memory = mmap.mmap(self._fd, layout.mapped_bytes())
        self._end = 0
        self.buffers = self._view(layout.buffers_part())
        self.slots = [
            Slot(number, {name: self._view(part) for name, part in layout.slot_parts().items()})
            for number in range(layout.slots)
        ]
        self.pinned = False
        """Whether the memory that is copied to the GPU is page-locked."""

    def _view(self, part: Part) -> np.ndarray:
        """The next array of the memory."""
        at, self._end = self._end, self._end + part.size
        if not part.size:
            return np.empty(part.shape, part.dtype)
        flat: np.ndarray = np.frombuffer(self._memory, part.dtype, math.prod(part.shape), at)
        return flat.reshape(part.shape)

    def slot(self, step: int) -> Slot:
        return self.slots[step % len(self.slots)]

    def empty(self, slot: Slot) -> None:
        """Give the memory of a slot's encoded pictures back: the next ones in their rows may be smaller."""
        if self.layout.backend == "encoded":
            at = slot["rows"].ctypes.data - self._address()
            self._memory.madvise(mmap.MADV_REMOVE, at, self.layout.slot_parts()["rows"].size)

    def __reduce__(self) -> tuple[Callable[..., "Arena"], tuple[Any, ...]]:
        return _mapped, (self.layout, DupFd(self._fd))

    def pin(self) -> None:
        """Page-lock the memory that is copied to the GPU, so that copies overlap with computation. Needs CUDA."""
        size = self.layout.mapped_bytes() if self.layout.backend == "host" else self.layout.buffers_part().size
        failed = torch.cuda.cudart().cudaHostRegister(self._address(), size, 0)
        if not int(failed):
            self.pinned = True
            return
        # Clear CUDA's last error with a kernel of our own, or the next kernel's launch would report it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
        log.warning(
            f"the host batch, {format_bytes(size)}, could not be page-locked (CUDA error {failed}); copies to the GPU "
            "will be slower: a smaller batch, or offload=encoded, has less to lock"
        )

    def _address(self) -> int:
        return torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()

    def close(self) -> None:
        """Undo `pin` and close the file. The memory is freed with its last view."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address())
            self.pinned = False
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _mapped(layout: Layout, fd: Any) -> Arena:
    return Arena(layout, fd.detach())


class PixelBackend:
    """One process's access to the image rows of an arena.

    With `encoded`, pictures are stored as their bytes, at the beginning of their rows: memory is used only where it is
    written to. A slot's `recipes` hold the number of a picture's bytes and its crop. A picture with more bytes than
    pixels is stored as pixels, with 0 for the number of bytes.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._transform = arena.layout.columns.images
        self._encoded = arena.layout.backend == "encoded"
        self._row = np.empty(self._transform.shape, np.uint8)

    def put(self, slot: Slot, place: int, data: bytes, rng: CounterRNG) -> None:
        """Store a sample. Raises BrokenSampleError before anything is written."""
        row = slot["rows"][place]
        if not self._encoded:
            self._transform(data, rng, row)
            return
        picture = Picture(data, self._transform.max_pixels)
        crop = self._transform.crop(picture, rng)
        # Decoded here already, so that a broken picture is skipped as with `host`.
        decoded = picture.decode()
        size = len(data)
        if size < row.nbytes:
            row.reshape(-1)[:size] = np.frombuffer(data, np.uint8)
        else:
            self._transform.render(decoded, crop, row)
            size = 0
        slot["recipes"][place] = (size, *crop)

    def check(self, data: bytes, rng: CounterRNG) -> None:
        """Raise BrokenSampleError where `put` does, but store nothing."""
        self._transform(data, rng, self._row)

    def load(self, number: int, start: int, stop: int, at: int) -> None:
        """Decode the pictures in rows start..stop of a slot, by its number, to place `at` of the buffers."""
        slot = self._arena.slots[number]
        recipes = slot["recipes"][start:stop].tolist()
        for pixels, row, (size, *numbers) in zip(self._arena.buffers[at:], slot["rows"][start:stop], recipes):
            if size:
                picture = Picture(row.reshape(-1)[:size].tobytes(), self._transform.max_pixels)
                self._transform.render(picture.decode(), Crop(*numbers), pixels)
            else:
                np.copyto(pixels, row)


Span = tuple[int, int]
Load = Callable[[Slot, int, int, int], Callable[[], None]]
"""`load(slot, start, stop, at)` starts to load rows start..stop of a slot to place `at` of the buffers and those after
it. The function it returns waits for them, and may be called again."""


class Prefetcher:
    """Image rows in buffers of host memory, loaded before they are asked for.

    `expect` names the ranges that will be asked for. The next one is loaded while the last one is in use. Without it,
    or after a request outside it, nothing is loaded ahead.
    """

    def __init__(self, buffers: np.ndarray, rows: int, load: Load, *, copy: bool = False) -> None:
        """`buffers`: (places, ...), written by `load`, each of `rows` places. `copy`: hand out copies to keep."""
        self._places = torch.from_numpy(buffers)
        self._capacity = rows
        self._load = load
        self._copy = copy
        count = len(buffers) // rows
        self._spans: list[Span | None] = [None] * count  # what each buffer holds, or will hold after this wait
        self._waits: list[Callable[[], None]] = [lambda: None] * count
        self._last = 0  # the buffer that was handed out last
        self._arrived = 0

    def open(self, slot: Slot) -> None:
        """Go on with the batch in that slot. The one before is not read any more."""
        for wait in self._waits:
            wait()
        self._spans = [None] * len(self._spans)
        self._slot = slot
        self._arrived = 0
        self.expect(())

    def expect(self, ranges: Iterable[Span]) -> None:
        """The row ranges that will be asked for, in order, each taken from the iterable before it is loaded."""
        self._ranges = iter(ranges)
        self._next = next(self._ranges, None)

    def arrived(self, count: int) -> None:
        self._arrived = count

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows start..stop, which must have arrived. Without `copy` the tensor holds until the call after the next."""
        assert stop - start <= self._capacity
        span = start, stop
        if self._next == span:
            self._next = next(self._ranges, None)
        else:
            self.expect(())
        if self._spans[self._last] != span:
            self._last = self._begin(self._last + 1, span)
        self._waits[self._last]()
        if self._next and self._next[1] <= self._arrived and self._next != span:
            self._begin(self._last + 1, self._next)
        first = self._last * self._capacity
        rows = self._places[first : first + stop - start]
        return rows.clone() if self._copy else rows

    def _begin(self, buffer: int, span: Span) -> int:
        """Start to load the range into the buffer (counted around), unless it holds it; returns the buffer's number."""
        buffer %= len(self._spans)
        if self._spans[buffer] != span:
            self._waits[buffer]()
            self._spans[buffer] = span
            self._waits[buffer] = self._load(self._slot, *span, buffer * self._capacity)
        return buffer


class HostBatch:
    """One local batch, valid until the next is asked for. Access to rows blocks until they have arrived."""

    def __init__(
        self, slot: Slot, layout: Layout, wait: Callable[[int], None], prefetcher: Prefetcher | None = None
    ) -> None:
        """`wait(stop)` blocks until rows 0..stop have arrived; `prefetcher` has the pixels that the slot has not."""
        self._slot = slot
        self._columns = layout.columns.beside
        self._wait = wait
        self._prefetcher = prefetcher
        self.captions = layout.texts[0]
        """Of a sample; caption j is of sample j // captions."""
        self.texts = len(slot["tokens"])
        """Captions, and behind them hard negatives."""

    def __len__(self) -> int:
        return len(self._slot["rows"])

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Name the ranges of pixels that will be asked for, in order, so that they can be loaded ahead."""
        if self._prefetcher:
            self._prefetcher.expect(ranges)

    def pixels(self, start: int, stop: int) -> Tensor:
        """(stop - start, C, S, S) uint8, in host memory.

        With device=cuda and offload=encoded, valid until the call after the next. Raises UserError if the
        workers cannot go on.
        """
        self._wait(stop)
        if self._prefetcher:
            return self._prefetcher.rows(start, stop)
        return torch.from_numpy(self._slot["rows"][start:stop])

    def tokens(self, start: int, stop: int) -> Tensor:
        """Texts start..stop, (stop - start, T) int32, a view of the batch's memory. Raises UserError as `pixels`."""
        self._wait(min(len(self), -(-stop // self.captions)))
        return torch.from_numpy(self._slot["tokens"][start:stop])

    def lengths(self) -> np.ndarray:
        """Tokens of every text without its padding, (kN,) int16; waits for all samples."""
        self._wait(len(self))
        return self._slot["lengths"]

    def column(self, name: str) -> Tensor:
        """(N, ...): the values of a column; waits for all samples."""
        self._wait(len(self))
        return torch.from_numpy(self._slot[name])

    def targets(self, device: torch.device) -> dict[str, Tensor]:
        """The columns that the loss takes, on the device, by their names; waits for all samples."""
        names = [column.name for column in self._columns if column.for_loss]
        return {name: self.column(name).to(device, non_blocking=True) for name in names}
