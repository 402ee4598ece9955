"""Counts the bytes of live tensors by watching every operation, and makes tensors that have a shape but no memory."""

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from clipscale.loss.communicator import Communicator, WaitFn
from clipscale.loss.runtime import LossRuntime, T
from clipscale.loss.triton.tuning import INTERPRETER, TileShape, tiles_for
from clipscale.tools.plan.assumed import ASSUMED

# torch's CUDA allocator hands out multiples of this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
ROUND = 512
# The most frequent operations, whose outputs are on their operands' device. Layer norms are not among them: on a CPU
# they return other types.
FREQUENT = {
    torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.sum.dim_IntList,
    torch.ops.aten.gelu.default, torch.ops.aten.gelu_backward.default, torch.ops.aten.empty_like.default,
    torch.ops.aten.zeros_like.default, torch.ops.aten.add.Tensor,
    torch.ops.aten.add_.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor, torch.ops.aten.logaddexp.out,
    torch.ops.aten.addmm.out, torch.ops.aten.baddbmm.out,
    torch.ops.aten.linalg_vector_norm.default,
}  # fmt: skip


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of live storages: `live`, and their highest number, `peak`.

    A storage counts from the operation that returns it until its last tensor, or the graph that saved it, is gone. Its
    bytes are rounded up as a GPU's allocator does. A kernel's own working memory is not seen.

    `operations` counts the operations seen. A tensor without values reads as 1.0, 0 or false.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.operations = 0
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        first = args[0] if args else None
        if func is torch.ops.prim.device.default and type(first) is FakeTensor:
            return first.fake_device  # three quarters of all calls ask for the device
        self.operations += 1
        if func is torch.ops.aten._local_scalar_dense.default and type(first) is FakeTensor:
            return first.dtype != torch.bool and float(first.dtype.is_floating_point)
        kwargs = kwargs or {}
        if func.is_view and type(first) is FakeTensor:
            return from_shapes(func, first, args, kwargs)
        if func in FREQUENT and type(first) is FakeTensor and are_fake(args) and not kwargs.get("device"):
            out = from_shapes(func, first, args, kwargs)
        else:
            out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._storages:
            self._storages.add(storage)
            size = allocated_bytes(storage.nbytes())
            weakref.finalize(storage, self._forget, size)
            self.live += size
            self.peak = max(self.peak, self.live)

    def _forget(self, size: int) -> None:
        self.live -= size

    def take_peak(self) -> int:
        """The peak since the last call, or since the start."""
        peak = self.peak
        self.peak = self.live
        return peak


def are_fake(args: tuple[object, ...]) -> bool:
    return all(type(x) is FakeTensor for x in args if isinstance(x, Tensor))


def from_shapes(
    func: Callable[..., object], fake: FakeTensor, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    """The output of an operation, on the device of its operand `fake`. It is faster than FakeTensorMode itself."""
    mode = fake.fake_mode
    device = fake.fake_device
    with in_kernel_invocation_manager(mode):
        out = func(*args, **kwargs)
    return tree_map_only(Tensor, lambda x: x if isinstance(x, FakeTensor) else FakeTensor(mode, x, device), out)


def allocated_bytes(size: int) -> int:
    """The bytes that a GPU's allocator takes for a storage."""
    return -(-size // ROUND) * ROUND


@contextmanager
def without_memory() -> Iterator[MemoryTracker]:
    """In this context, tensors have shapes and dtypes but no values, and the tracker counts the memory that they would
    take."""
    with FakeTensorMode(allow_non_fake_inputs=True), MemoryTracker() as tracker:
        yield tracker


class DryRunRuntime(LossRuntime):
    """The machine of a loss on tensors without values: a GPU of a compute capability, or (None) the CPU.

    Only the first tile or panel of a block is computed, because the others use the same buffers. On a GPU Triton's
    backend runs without its kernels.
    """

    def __init__(self, capability: int | None, world_size: int = 1, ranks_of_node: int | None = None) -> None:
        super().__init__(ranks_of_node=ranks_of_node)
        self.capability = capability
        self.world_size = world_size

    def communicator(self, group: object) -> Communicator | None:
        return DryCommunicator(self.world_size) if self.world_size > 1 else None

    def is_gpu(self, device: torch.device) -> bool:
        return self.capability is not None

    def tiles_to_run(self, tiles: Iterator[T]) -> Iterator[T]:
        return itertools.islice(tiles, 1)

    def tile_shape(self, device: torch.device, dtype: torch.dtype) -> TileShape:
        return tiles_for(self.capability, dtype) if self.capability else INTERPRETER

    def launch(self, *arguments: object, **constants: object) -> None:
        pass

    def add_product(self, out: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
        pass


class DryCommunicator(Communicator):
    """One of `size` ranks. The other ranks do not exist, so the tensors that it receives have only shapes."""

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size

    def start_send_receive(self, tensors: list[Tensor], peers: tuple[int, int], tag: int = 0) -> WaitFn:
        received = [x.clone() for x in tensors]

        def wait(sent: list[Tensor] = tensors) -> list[Tensor]:  # these live until they have been sent
            return received

        return wait

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[: len(x) // self.size].clone()

    def all_reduce_(self, x: Tensor, op: object = None) -> Tensor:
        return x

    def split_by_node(self, nodes: int, timeout: timedelta | None = None) -> tuple[Communicator, Communicator]:
        return DryCommunicator(nodes), DryCommunicator(self.size // nodes)


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """In this context, autocast on a CPU runs the same operations in float32 as on CUDA."""
    kernels = torch.library.Library("aten", "IMPL")  # the library's kernels disappear with it
    with warnings.catch_warnings(action="ignore"):  # torch 2.11 says that some are there already
        for name in ASSUMED.float32_on_cuda:
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
            kernels.impl(name, partial(_in_float32, operation), "AutocastCPU")
    try:
        yield
    finally:
        del kernels


def _in_float32(operation: Callable[..., Tensor], *args: object, **kwargs: object) -> Tensor:
    half = torch.bfloat16, torch.float16
    args = tuple(x.float() if isinstance(x, Tensor) and x.dtype in half else x for x in args)
    with torch.autocast("cpu", enabled=False):
        return operation(*args, **kwargs)
