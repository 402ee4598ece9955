"""Counts the bytes of live tensors by watching every operation, and makes tensors that have a shape but no memory."""

import itertools
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from clipscale.loss.machine import Machine, T
from clipscale.loss.triton.tuning import INTERPRETER, Tiles, tiles_for
from clipscale.tools.plan import ASSUMED

ROUND = 512
"""torch's CUDA allocator hands out multiples of this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""


class MemoryTracker(TorchDispatchMode):
    """`live` and `peak`: bytes of the storages that operations return, each rounded up as a GPU's allocator does, until
    its last tensor, or the graph that saved it, is gone. What a kernel takes while it runs is not seen.
    """

    def __init__(self, *, values: bool = True) -> None:
        """`values`: tensors have some; without, a float reads 1.0, an integer 0, a condition false."""
        super().__init__()
        self.live = self.peak = 0
        self.history: list[int] = []
        """`live` after each operation."""
        self._values = values
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and the check takes time at each operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device  # three quarters of all calls ask for the device
        if DTensor in types:
            return NotImplemented  # its local tensors come here later and are counted then
        if func is torch.ops.aten._local_scalar_dense.default and not self._values:
            dtype = args[0].dtype
            return dtype != torch.bool and float(dtype.is_floating_point)
        if func.is_view and type(args[0]) is FakeTensor:  # FakeTensorMode itself takes long over each view
            mode, device = args[0].fake_mode, args[0].fake_device
            with in_kernel_invocation_manager(mode):
                views = func(*args, **(kwargs or {}))
            return tree_map_only(Tensor, lambda view: FakeTensor(mode, view, device), views)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                self._count(leaf.untyped_storage())
        if func.namespace in ("c10d", "fsdp"):  # FSDP2 frees and takes storages by their size, between such operations
            for key, reference in self._references.items():
                if storage := reference():
                    self._set_size(key, storage.nbytes())
        self.history.append(self.live)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._references:
            self._sizes[key] = 0
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
            self._set_size(key, storage.nbytes())

    def _set_size(self, key: int, size: int) -> None:
        size = -(-size // ROUND) * ROUND
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        del self._references[key]

    def take_peak(self) -> int:
        """The peak since the last call, or since the start."""
        peak, self.peak = self.peak, self.live
        return peak


@contextmanager
def without_memory() -> Iterator[MemoryTracker]:
    """Inside, tensors have shapes and dtypes but no values, and the tracker counts the memory that they would take."""
    with FakeTensorMode(allow_non_fake_inputs=True), MemoryTracker(values=False) as tracker:
        yield tracker


class DryMachine(Machine):
    """A GPU of a compute capability, or (None) the CPU, for the loss of tensors without values: only the first tile or
    panel of a block, because the others use the same buffers, and on a GPU Triton's backend without its kernels.
    """

    def __init__(self, capability: int | None, ranks_of_node: int | None = None) -> None:
        super().__init__(ranks_of_node=ranks_of_node)
        self.capability = capability

    def is_gpu(self, device: torch.device) -> bool:
        return self.capability is not None

    def parts(self, parts: Iterator[T]) -> Iterator[T]:
        return itertools.islice(parts, 1)

    def tiles(self, device: torch.device, dtype: torch.dtype) -> Tiles:
        return tiles_for(self.capability, dtype) if self.capability else INTERPRETER

    def launch(self, *arguments: Any, **constants: Any) -> None:
        pass

    def add_product(self, out: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
        pass


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Inside, autocast on a CPU runs the operations in float32 that it runs so on CUDA."""
    kernels = torch.library.Library("aten", "IMPL")  # its kernels go with it
    with warnings.catch_warnings(action="ignore"):  # torch 2.11 says that some are there already
        for name in ASSUMED.float32_on_cuda:
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
            kernels.impl(name, partial(_in_float32, operation), "AutocastCPU")
    try:
        yield
    finally:
        del kernels


def _in_float32(operation: Any, *args: Any, **kwargs: Any) -> Any:
    half = torch.bfloat16, torch.float16
    args = tuple(x.float() if isinstance(x, Tensor) and x.dtype in half else x for x in args)
    with torch.autocast("cpu", enabled=False):
        return operation(*args, **kwargs)
