"""The local batch in host memory: allocated once, shared with the workers, which write decoded samples straight into their places.

N: samples of the local batch, C: channels, S: side in pixels, T: tokens.
"""

import hashlib
import logging
import math
import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)

PAGE = 4096


def sample_id(url: str, key: str) -> int:
    """A 64-bit name of a sample: shards moved to another folder keep theirs."""
    text = f"{url.rsplit('/', 1)[-1]}/{key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True)
class Slot:
    """One local batch: pixels (N, C, S, S) uint8, tokens (N, T) int64, ids (N,) int64."""

    pixels: np.ndarray
    tokens: np.ndarray
    ids: np.ndarray

    def first(self, n: int) -> "Slot":
        """The first n samples of it, where a batch is smaller than the largest."""
        return self if n == len(self.ids) else Slot(self.pixels[:n], self.tokens[:n], self.ids[:n])


def arena_layout(
    count: int, samples: int, side: int, context_length: int
) -> tuple[list[tuple[tuple[int, ...], type, int]], int]:
    """Shape, type and whole pages in bytes of a slot's parts; and the bytes of `count` slots."""
    shapes: list[tuple[tuple[int, ...], type]] = [
        ((samples, 3, side, side), np.uint8),
        ((samples, context_length), np.int64),
        ((samples,), np.int64),
    ]
    parts = [(shape, kind, -(-math.prod(shape) * np.dtype(kind).itemsize // PAGE) * PAGE) for shape, kind in shapes]
    return parts, count * sum(size for _, _, size in parts)


class Arena:
    """`count` slots in one block of anonymous memory that worker processes map too.

    Anonymous files (memfd) do not count against /dev/shm, whose size containers keep small.
    """

    def __init__(self, count: int, samples: int, side: int, context_length: int, fd: int | None = None) -> None:
        self._shape = (count, samples, side, context_length)
        parts, total = arena_layout(*self._shape)
        self._fd = _anonymous_file(total) if fd is None else fd
        self._memory = mmap.mmap(self._fd, total)
        self.slots = []
        offset = 0
        for _ in range(count):
            views = []
            for shape, kind, size in parts:
                flat: np.ndarray = np.frombuffer(self._memory, dtype=kind, count=int(np.prod(shape)), offset=offset)
                views.append(flat.reshape(shape))
                offset += size
            self.slots.append(Slot(*views))
        self._whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._pinned = False

    def __reduce__(self) -> tuple[Callable[..., "Arena"], tuple[Any, ...]]:
        return _mapped, (self._shape, DupFd(self._fd))

    def pin(self) -> None:
        """Page-lock the block, so that copies to the GPU run beside computation. Needs CUDA."""
        failed = torch.cuda.cudart().cudaHostRegister(self._whole.data_ptr(), self._whole.numel(), 0)
        if int(failed):
            log.warning(
                "the host batch could not be page-locked (CUDA error %s); copies to the GPU will be slower", failed
            )
        self._pinned = not int(failed)

    def close(self) -> None:
        """Undo `pin` and close the file; the memory goes when the last view of it goes."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._whole.data_ptr())
            self._pinned = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _mapped(shape: tuple[int, int, int, int], fd: Any) -> Arena:
    return Arena(*shape, fd=fd.detach())


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("clipscale-batch")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


class HostBatch:
    """One local batch, valid until the next is asked for. Rows may still be on their way: access blocks until they are there."""

    def __init__(self, slot: Slot, wait: Callable[[int], None]) -> None:
        self._pixels, self._tokens, self._ids = (
            torch.from_numpy(part) for part in (slot.pixels, slot.tokens, slot.ids)
        )
        self._wait = wait

    def __len__(self) -> int:
        return len(self._ids)

    def pixels(self, start: int, stop: int) -> Tensor:
        """(stop - start, C, S, S) uint8, a view of the batch's memory. Raises UserError if the workers cannot go on."""
        self._wait(stop)
        return self._pixels[start:stop]

    def tokens(self, start: int, stop: int) -> Tensor:
        """(stop - start, T) int64, a view of the batch's memory. Raises UserError if the workers cannot go on."""
        self._wait(stop)
        return self._tokens[start:stop]

    def ids(self) -> Tensor:
        """(N,) int64: `sample_id` of every sample; waits for all of them."""
        self._wait(len(self))
        return self._ids
