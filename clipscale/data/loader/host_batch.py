"""The local batch in host memory, allocated once. Workers share it and write each sample into its row.

N: samples of the local batch, k: texts of each (captions, then hard negatives), C: channels, S: side in pixels,
T: tokens.
"""

import contextlib
import logging
import math
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from clipscale.common import ranks
from clipscale.common.batch import ONE_CAPTION, TextLayout
from clipscale.common.errors import UserError
from clipscale.common.memory import free_memory
from clipscale.common.units import format_bytes
from clipscale.data.shards.features import TeacherFeatures

log = logging.getLogger(__name__)

PAGE = 4096
# The memory of one local batch: its arrays by name (see BatchLayout.slot_arrays).
Slot = dict[str, np.ndarray]


class ArraySpec(NamedTuple):
    """Shape and type of an array in the arena."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Bytes, in whole pages."""
        return -(-math.prod(self.shape) * np.dtype(self.dtype).itemsize // PAGE) * PAGE


@dataclass(frozen=True)
class BatchLayout:
    """The sizes of one rank's batch memory."""

    slots: int  # local batches in memory at once
    samples: int  # of the local batch
    image_size: int
    context_length: int
    text_layout: TextLayout = ONE_CAPTION  # captions and hard negatives of a sample
    # The teachers whose features each slot holds beside the samples.
    teachers: tuple[TeacherFeatures, ...] = ()

    @property
    def num_texts(self) -> int:
        """Captions and hard negatives of the local batch."""
        return self.samples * self.text_layout.texts_per_sample

    def text_rows(self, sample: int) -> list[int]:
        """The rows of a sample's captions, and then of its hard negatives."""
        return self.text_layout.rows_of(sample, self.samples)

    def slot_arrays(self) -> dict[str, ArraySpec]:
        """The arrays of one slot in shared memory."""
        return {
            "tokens": ArraySpec((self.num_texts, self.context_length), "int32"),
            "sameness_keys": ArraySpec((self.samples,), "int64"),
            **{teacher.member: ArraySpec((self.samples, *teacher.shape), teacher.dtype) for teacher in self.teachers},
            "lengths": ArraySpec((self.num_texts,), "int16"),
            "pixels": ArraySpec((self.samples, 3, self.image_size, self.image_size), "uint8"),
        }

    def memory_bytes(self) -> int:
        """Host memory of all slots."""
        return self.slots * sum(spec.size for spec in self.slot_arrays().values())


def check_memory(layout: BatchLayout, free_bytes: int | None) -> str:
    """Check the batch memory. Returns a line that states it. Raises UserError if the machine has too little for all its
    processes.

    `free_bytes`: `free_memory` before any process of this machine allocated its batches; None to ask now.
    """
    if free_bytes is None:
        free_bytes = free_memory()
    processes = ranks.local_world_size()
    share = free_bytes / processes
    need = layout.memory_bytes()
    batches = f"{layout.slots} x {layout.samples} samples"
    if need > share:
        fewer_buffers = "data.buffers=1, " if layout.slots > 1 else ""
        raise UserError(
            f"data.buffers={layout.slots}: {batches} need {format_bytes(need)} of host memory in each process, and "
            f"{format_bytes(share)} are free for each of {processes}; take "
            f"{fewer_buffers}a smaller batch or more machines"
        )
    return f"batch memory: {batches}, {format_bytes(need)} of {format_bytes(share)} free in each process"


class SharedFile(Protocol):
    """A file descriptor on its way to another process."""

    def detach(self) -> int: ...


class Arena:
    """The memory of one rank's batches, shared with its worker processes. `create_arena` makes it.

    It is an anonymous file (memfd), which does not count against /dev/shm: containers keep that small.
    """

    def __init__(self, layout: BatchLayout, fd: int, memory: mmap.mmap) -> None:
        """`fd`: the file, which is mapped at `memory`."""
        self.layout = layout
        self._fd = fd
        self._memory = memory
        self.slots = slots_in(memory, layout)
        # Whether the memory is page-locked.
        self.is_pinned = False

    def slot(self, step: int) -> Slot:
        return self.slots[step % len(self.slots)]

    def __reduce__(self) -> tuple[object, ...]:
        return _shared_arena, (self.layout, DupFd(self._fd))

    def pin(self) -> None:
        """Page-lock the memory, so that copies to the GPU overlap with computation. Needs CUDA."""
        size = self.layout.memory_bytes()
        failed = torch.cuda.cudart().cudaHostRegister(self._address(), size, 0)
        if not int(failed):
            self.is_pinned = True
            return
        # This launch clears CUDA's last error. Otherwise the next launch elsewhere would report it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
        log.warning(
            f"the host batch, {format_bytes(size)}, could not be page-locked (CUDA error {failed}); copies to the GPU "
            "will be slower: a smaller batch, or data.buffers=1, has less to lock"
        )

    def _address(self) -> int:
        return torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()

    def close(self) -> None:
        """Undo `pin` and close the file. The memory is freed with its last view."""
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address())
            self.is_pinned = False
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def create_arena(layout: BatchLayout) -> Arena:
    fd = os.memfd_create("clipscale-batch")
    os.ftruncate(fd, layout.memory_bytes())
    return Arena(layout, fd, mmap.mmap(fd, layout.memory_bytes()))


def _shared_arena(layout: BatchLayout, shared: SharedFile) -> Arena:
    """Make the arena in another process, with the file that its creator has `shared`."""
    fd: int = shared.detach()
    return Arena(layout, fd, mmap.mmap(fd, layout.memory_bytes()))


def slots_in(memory: mmap.mmap, layout: BatchLayout) -> list[Slot]:
    """The arrays of all slots, one after another in the memory."""
    slots: list[Slot] = []
    offset = 0
    for _ in range(layout.slots):
        slot: Slot = {}
        for name, spec in layout.slot_arrays().items():
            slot[name] = np.ndarray(spec.shape, spec.dtype, memory, offset)
            offset += spec.size
        slots.append(slot)
    return slots


class HostBatch:
    """One local batch, valid until the next one is requested. Reading rows blocks until they have arrived."""

    def __init__(self, slot: Slot, layout: BatchLayout, wait: Callable[[int], None]) -> None:
        """`wait(stop)` blocks until samples 0..stop have arrived."""
        self._slot = slot
        self._text_layout = layout.text_layout
        self._teachers = layout.teachers
        self._wait = wait

    def __len__(self) -> int:
        return len(self._slot["pixels"])

    @property
    def num_texts(self) -> int:
        """The number of texts: captions and hard negatives in the order of `TextLayout`."""
        return len(self._slot["tokens"])

    @property
    def context_length(self) -> int:
        """Tokens of a text, with its padding."""
        return int(self._slot["tokens"].shape[1])

    def pixels(self, start: int, stop: int) -> Tensor:
        """(stop - start, C, S, S) uint8, a view of the batch's memory. Raises UserError if the workers have failed."""
        self._wait(stop)
        return torch.from_numpy(self._slot["pixels"][start:stop])

    def tokens(self, start: int, stop: int) -> Tensor:
        """Texts start..stop, (stop - start, T) int32, a view of the batch's memory. Raises as `pixels`."""
        self._wait(min(len(self), -(-stop // self._text_layout.captions)))
        return torch.from_numpy(self._slot["tokens"][start:stop])

    def lengths(self) -> np.ndarray:
        """The number of tokens of each text, without padding: (kN,) int16. Waits for all samples."""
        self._wait(len(self))
        return self._slot["lengths"]

    def sameness_keys(self) -> Tensor:
        """(N,) int64, equal for samples that are the same by `data.same`. Waits for all samples."""
        self._wait(len(self))
        return torch.from_numpy(self._slot["sameness_keys"])

    def teachers(self) -> list[Tensor]:
        """Each teacher's features of pictures and captions, (N, 2, D). Waits for all samples."""
        self._wait(len(self))
        return [torch.from_numpy(self._slot[teacher.member]) for teacher in self._teachers]
