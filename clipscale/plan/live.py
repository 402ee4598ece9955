"""Bytes of tensors alive, counted as operations make them; and tensors that have a shape but no memory, on a machine without the GPU.

Nothing here knows the model or the step: what allocates is found by watching.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clipscale.loss import api
from clipscale.loss import torch_backend as tiled
from clipscale.loss.similarity import CUDA_TILE
from clipscale.loss.triton import panels as triton_panels
from clipscale.loss.triton.tuning import tiles_for

ROUND = 512
"""torch's CUDA allocator hands out multiples of it (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""


WIDENED = (
    torch.nn.functional.layer_norm, torch.layer_norm, torch.group_norm, torch.softmax, torch.log_softmax, torch.sum, torch.cumsum,
    torch.prod, torch.norm, torch.exp, torch.log, torch.pow, torch.rsqrt, torch.reciprocal, torch.nn.functional.softmax,
    torch.nn.functional.group_norm, torch.Tensor.softmax, torch.Tensor.log_softmax, torch.Tensor.sum, torch.Tensor.norm,
    torch.Tensor.exp, torch.Tensor.log, torch.Tensor.pow, torch.Tensor.rsqrt,
)  # fmt: skip
"""What autocast computes in float32 on CUDA, but not on a CPU (torch's documentation of amp, "CUDA Ops that can autocast to float32"):
operations that encoders use."""


class LiveBytes(TorchDispatchMode):
    """`live` and `peak`: bytes of all storages made within that still exist, each rounded up as a GPU's allocator does.

    A storage counts from the operation that returns it until its last tensor, or the graph that saved it, is gone. What a kernel takes
    for itself while it runs is not seen.
    """

    def __init__(self, *, unknown: bool = False) -> None:
        """`unknown`: tensors have no values; a number asked of one is 1.0, an integer 0, a condition false."""
        super().__init__()
        self.live = self.peak = 0
        self._unknown = unknown
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device  # asked for three times as often as all else
        if DTensor in types:
            return NotImplemented  # its parts are counted, when they come by
        if self._unknown and func is torch.ops.aten._local_scalar_dense.default:
            kind = args[0].dtype
            return 1.0 if kind.is_floating_point else False if kind == torch.bool else 0
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                self._count(leaf.untyped_storage())
        return out

    def __enter__(self) -> "LiveBytes":
        self._resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            """FSDP2 gives memory back by emptying storages."""
            result = self._resize(storage, size)
            if id(storage) in self._sizes:
                self._change(id(storage), storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._references:
            return
        self._sizes[key] = 0
        self._references[key] = weakref.ref(storage, lambda _: self._gone(key))
        self._change(key, storage.nbytes())

    def _change(self, key: int, size: int) -> None:
        size = -(-size // ROUND) * ROUND
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        del self._references[key]

    def since(self) -> int:
        """The peak since this was last asked, or since the start."""
        peak, self.peak = self.peak, self.live
        return peak


@contextmanager
def without_memory() -> Iterator[LiveBytes]:
    """Tensors made within have shapes and types and no values; what they would take is counted.

    In the loss all tiles of a block, and all panels, have the same buffers: the first stands for the others.
    """

    def first_of(make: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        return lambda *args: itertools.islice(make(*args), 1)

    with (
        patch.object(tiled.TorchBackend, "_tiles", first_of(tiled.TorchBackend._tiles)),
        patch.object(triton_panels.Problem, "panels", first_of(triton_panels.Problem.panels)),
        FakeTensorMode(allow_non_fake_inputs=True),
        LiveBytes(unknown=True) as memory,
    ):
        yield memory


@contextmanager
def as_on_cuda(capability: int) -> Iterator[None]:
    """CPU tensors without values, treated as a GPU of that compute capability would: autocast's float32 operations, the loss's backend.

    The Triton kernels are not run.
    """

    def backend(config: api.LossConfig, inputs: Any) -> str:
        usual = "triton" if config.similarity == "dot" and inputs.operands != torch.float64 else "tiled"
        return usual if config.backend == "auto" else config.backend

    def aligned(x: Tensor, depth: int) -> Tensor:
        padded = -(-x.shape[1] // depth) * depth
        return x if padded == x.shape[1] else x.new_zeros((len(x), padded))

    with ExitStack() as stack:
        for place, name, stand_in in (
            (api, "_chosen_backend", backend),
            (api.Dot, "tile", lambda self, block: CUDA_TILE),
            (triton_panels, "tiles_on", lambda device, *asked: tiles_for(capability, *asked)),
            (triton_panels, "_aligned", aligned),
            (triton_panels, "_add_product", lambda out, a, b: None),
            (triton_panels, "launch", lambda *args, **constants: None),
        ):
            stack.enter_context(patch.object(place, name, stand_in))
        stack.enter_context(_Widening())
        yield


class _Widening(TorchFunctionMode):
    """Autocast on CUDA takes some operations to float32 that it leaves alone on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WIDENED and torch.is_autocast_enabled("cpu"):
            args = tuple(_wide(x) for x in args)
        return func(*args, **(kwargs or {}))


def _wide(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) else x
