"""Hardware hooks of the loss: GPU or not, tile shapes, kernel launches, the process group.

The loss asks `current_runtime()` for them. Three callers set another one, with `running_on`: a run (`train.py`), for
the timeout of its groups; `clipscale plan`, by a `DryRunRuntime`, which computes nothing; and tests, which choose
tiles.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from clipscale.common import ranks
from clipscale.common.half_precision import add_half_product
from clipscale.loss.communicator import Communicator
from clipscale.loss.similarity import matmul_into
from clipscale.loss.triton.tuning import INTERPRETER, TileShape, tiles_for

T = TypeVar("T")


class LossRuntime:
    """The hardware of this process, as the loss sees it."""

    # Most bytes of partial sums: as many as a 32k x 32k panel of 128 x 128 tiles has.
    max_partial_bytes = 128 << 20

    def __init__(self, ranks_of_node: int | None = None, timeout: timedelta | None = None) -> None:
        """`ranks_of_node`: ranks on each node; None to take it from torchrun or Slurm.

        `timeout`: of the groups that an exchange makes; None for torch's.
        """
        self.ranks_of_node = ranks_of_node
        self.timeout = timeout

    def num_nodes(self, group_size: int) -> int:
        """The number of nodes that a group of this size spans; 1 if unknown, as for a subgroup."""
        node_size = self.ranks_of_node
        if node_size is None and ranks.under_launcher() and ranks.size() == group_size:
            node_size = ranks.local_world_size(unknown=group_size)
        return group_size // node_size if node_size and group_size % node_size == 0 else 1

    def communicator(self, group: dist.ProcessGroup | DeviceMesh | None) -> Communicator | None:
        """See `Communicator.for_group`."""
        return Communicator.for_group(group)

    def is_gpu(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def tiles_to_run(self, tiles: Iterator[T]) -> Iterator[T]:
        """The tiles or panels of a block to compute: all. A dry run takes the first alone, for its buffers."""
        return tiles

    def tile_shape(self, device: torch.device, dtype: torch.dtype) -> TileShape:
        """The tile shape of the Triton kernels."""
        return tiles_for(_capability(device), dtype) if device.type == "cuda" else INTERPRETER

    def has_descriptors(self, x: Tensor) -> bool:
        """Whether kernels load and store by tensor descriptors (TMA, from Hopper on). float32 products would spill."""
        return x.is_cuda and _capability(x.device) >= 90 and x.dtype != torch.float32

    def launch(self, kernel: Any, programs: int, device: torch.device, *arguments: object, **options: object) -> None:
        """Run a Triton kernel in this number of `programs`."""
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            kernel[(programs,)](*arguments, **options)

    def add_product(self, out: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
        """out (float32) += factor * a b, accumulated in float32."""
        if a.is_cuda and a.dtype != torch.float32:
            add_half_product(out, a, b, factor)
        else:
            matmul_into(a, b, out, factor, beta=1)


_current: ContextVar[LossRuntime | None] = ContextVar("current_runtime", default=None)


def current_runtime() -> LossRuntime:
    """Where a loss that is called now runs: this machine, or the runtime of `running_on`."""
    return _current.get() or LossRuntime()


@contextlib.contextmanager
def running_on(runtime: LossRuntime) -> Iterator[None]:
    """Losses that are called inside are computed by this runtime. Their backward passes are too, wherever they run."""
    token = _current.set(runtime)
    try:
        yield
    finally:
        _current.reset(token)


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
