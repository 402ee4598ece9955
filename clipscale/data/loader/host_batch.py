"""The local batch in host memory: allocated once, shared with the workers, which write decoded samples straight into their places.

N: samples of the local batch, C: channels, S: side in pixels, T: tokens.
"""

import contextlib
import hashlib
import logging
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clipscale.errors import UserError
from clipscale.units import format_bytes

log = logging.getLogger(__name__)

PAGE = 4096
BUFFERS = 3
"""Chunks in a window at once: the one computed on, the one being copied to the device, and the one being made ready."""
RECIPE = 11
"""Numbers noted of an encoded picture: the four of tiers.Recipe, and the seven of its crop (decode.py)."""


def sample_id(url: str, key: str) -> int:
    """A 64-bit name of a sample: shards moved to another folder keep theirs."""
    text = f"{url.rsplit('/', 1)[-1]}/{key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


class Part(NamedTuple):
    """An array in the block: shape, type, and the whole pages it takes, in bytes."""

    shape: tuple[int, ...]
    dtype: str
    size: int


def _part(shape: tuple[int, ...], dtype: str) -> Part:
    return Part(shape, dtype, -(-math.prod(shape) * np.dtype(dtype).itemsize // PAGE) * PAGE)


@dataclass(frozen=True)
class Layout:
    """What one rank keeps of its batches, and where."""

    slots: int
    """Local batches held at once."""
    samples: int
    """Samples of the largest local batch."""
    row: tuple[int, ...]
    """Shape of what the image tower takes of one sample: (C, S, S) pixels, or the features of a frozen tower."""
    context_length: int
    dtype: str = "uint8"
    """Of an image row."""
    tier: str = "host"
    """Where image rows wait: `host` memory, `disk`, `encoded` in host memory as the picture's bytes, or `device`: the same, to be decoded
    on the device (data.decode=gpu)."""
    chunk: int = 1
    """disk, encoded: samples that are made ready in host memory at once."""
    pool: int = 0
    """encoded, device: bytes that the pictures of one slot may take. Address space: memory is taken as it is written to."""
    decoded: bool = False
    """device: image rows are kept in host memory besides, where the device puts them as soon as it has decoded them."""
    folder: str | None = None
    """disk: where the file lies; it has no name there. None: the system's folder for temporary files."""

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row) * np.dtype(self.dtype).itemsize

    @property
    def encoded(self) -> bool:
        """Whether pictures wait as their bytes."""
        return self.tier in ("encoded", "device")

    @property
    def setting(self) -> str:
        """The setting that has rows wait as they do."""
        return "data.decode=gpu" if self.tier == "device" else f"offload={self.tier}"

    def slot_parts(self) -> dict[str, Part]:
        """The arrays of one slot in shared memory."""
        parts = {
            "tokens": _part((self.samples, self.context_length), "int32"),
            "ids": _part((self.samples,), "int64"),
        }
        if self.tier == "host":
            parts["rows"] = _part((self.samples, *self.row), self.dtype)
        elif self.encoded:
            parts["recipes"] = _part((self.samples, RECIPE), "int64")
            parts["pool"] = _part((self.pool,), "uint8")
        return parts

    def window_part(self) -> Part:
        """The buffers in which chunks are made ready; none where rows wait in memory anyway, or become rows on the device. With `decoded`,
        the rows of all slots."""
        if self.tier == "device":
            return _part((self.slots if self.decoded else 0, self.samples, *self.row), self.dtype)
        buffers = 0 if self.tier == "host" else BUFFERS
        return _part((buffers, min(self.chunk, self.samples), *self.row), self.dtype)

    def memory_bytes(self, picture_bytes: float | None = None) -> int:
        """Host memory of the whole; where pictures wait, with pictures of so many bytes on average (None: as many as the pool can hold)."""
        total = self.slots * sum(part.size for part in self.slot_parts().values()) + self.window_part().size
        if self.encoded and picture_bytes is not None:
            total -= self.slots * max(0, self.pool - int(self.samples * picture_bytes))
        return total

    def disk_bytes(self) -> int:
        return self.slots * self.samples * self.row_bytes if self.tier == "disk" else 0


class Slot(dict[str, np.ndarray]):
    """One local batch: its arrays by name (see Layout.slot_parts). tokens (N, T) int32, ids (N,) int64."""

    def __init__(self, number: int, parts: dict[str, np.ndarray]) -> None:
        super().__init__(parts)
        self.number = number


class Arena:
    """The memory of one rank's batches: a block of anonymous memory that worker processes map too, and for `disk` a file.

    Anonymous files (memfd) do not count against /dev/shm, whose size containers keep small. The file on disk has no name and is gone
    with the last process that holds it; its whole size is reserved at once. It is read and written by system calls rather than mapped:
    what goes wrong with a disk is then an error with a reason, where a mapping would kill the process.

    Raises UserError where the disk has no room.
    """

    def __init__(self, layout: Layout, fds: tuple[int, int] | None = None) -> None:
        self.layout = layout
        parts, window = layout.slot_parts(), layout.window_part()
        total = layout.slots * sum(part.size for part in parts.values()) + window.size
        self.file = -1
        if fds is None:
            self._fd = _anonymous_file(total)
            if layout.tier == "disk":
                self.file = _reserved_file(layout.folder, layout.disk_bytes())
        else:
            self._fd, self.file = fds
        self._memory = mmap.mmap(self._fd, total)
        offset = 0

        def view(part: Part) -> np.ndarray:
            nonlocal offset
            flat: np.ndarray = np.frombuffer(self._memory, part.dtype, math.prod(part.shape), offset)
            offset += part.size
            return flat.reshape(part.shape)

        self.window = view(window) if window.size else np.empty(window.shape, window.dtype)
        self.slots = [Slot(n, {name: view(part) for name, part in parts.items()}) for n in range(layout.slots)]
        self._pinned: Tensor | None = None
        self.pin_failure: str | None = None
        """Why what is copied to the GPU could not be page-locked, where that was tried."""

    @property
    def pinned(self) -> bool:
        """Is what is copied to the GPU page-locked."""
        return self._pinned is not None

    def __reduce__(self) -> tuple[Callable[..., "Arena"], tuple[Any, ...]]:
        return _mapped, (self.layout, DupFd(self._fd), DupFd(self.file) if self.file >= 0 else None)

    def pin(self) -> None:
        """Page-lock what is copied to the GPU, so that copies run beside computation. Needs CUDA."""
        end = None if self.layout.tier == "host" else self.layout.window_part().size
        if end == 0:
            return  # the device's decoder takes pictures to the GPU by itself
        block = torch.frombuffer(self._memory, dtype=torch.uint8)[:end]
        failed = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)
        if int(failed):
            # CUDA's last error would be taken for that of the next kernel: let it be this one's.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda").add_(1)
            self.pin_failure = (
                f"the host batch, {format_bytes(block.numel())}, could not be page-locked (CUDA error {failed}); copies to the GPU will be "
                "slower: a smaller batch, or offload=encoded, has less to lock"
            )
            log.warning("%s", self.pin_failure)
        self._pinned = None if int(failed) else block

    def close(self) -> None:
        """Undo `pin` and close the files; the memory goes when the last view of it goes."""
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr())
            self._pinned = None
        for fd in (self._fd, self.file):
            if fd >= 0:
                os.close(fd)
        self._fd = self.file = -1


def _mapped(layout: Layout, fd: Any, file: Any) -> Arena:
    return Arena(layout, (fd.detach(), file.detach() if file is not None else -1))


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("clipscale-batch")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


def _reserved_file(folder: str | None, size: int) -> int:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fd = os.dup(file.fileno())
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise UserError(
            f"offload_dir={folder or tempfile.gettempdir()}: {size / 2**30:.1f} GiB for the batch cannot be reserved there "
            f"({error.strerror}); make room, choose another folder, or take offload=encoded or host"
        ) from error
    return fd


class HostBatch:
    """One local batch, valid until the next is asked for. Rows may still be on their way: access blocks until they are there.

    `rows` makes image rows ready that do not wait in memory as they are.
    """

    def __init__(
        self,
        slot: Slot,
        size: int,
        wait: Callable[[int], None],
        rows: Callable[[int, int], Tensor] | None = None,
        expect: Callable[[Iterable[tuple[int, int]]], None] = lambda _: None,
    ) -> None:
        self._size, self._wait = size, wait
        self._tokens, self._ids = torch.from_numpy(slot["tokens"]), torch.from_numpy(slot["ids"])
        self._rows = rows
        self._images = None if rows else torch.from_numpy(slot["rows"])
        self.expect = expect
        """Takes the ranges of image rows that will be asked for, in order, so that they can be loaded ahead."""

    def __len__(self) -> int:
        return self._size

    def pixels(self, start: int, stop: int) -> Tensor:
        """(stop - start, C, S, S) uint8, or stored features: a view of the batch's memory, or, decoded on the device anew, there.

        Raises UserError if the workers cannot go on.
        """
        self._wait(stop)
        if self._images is not None:
            return self._images[start:stop]
        assert self._rows
        return self._rows(start, stop)

    def tokens(self, start: int, stop: int) -> Tensor:
        """(stop - start, T) int32, a view of the batch's memory. Raises UserError if the workers cannot go on."""
        self._wait(stop)
        return self._tokens[start:stop]

    def ids(self) -> Tensor:
        """(N,) int64: `sample_id` of every sample; waits for all of them."""
        self._wait(len(self))
        return self._ids[: len(self)]
