"""The ranks of a run: this process's rank, its device, and the collectives."""

from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from clipscale.distributed.rank_signals import RankSignals

T = TypeVar("T")

# How long a rank waits for the others, which may be loading models.
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class AsyncReduction:
    """A reduction that runs in the background."""

    tensor: Tensor
    # The reduction; None if it has ended, and `tensor` is the result.
    work: dist.Work | None = None

    def values(self) -> list[int]:
        """The result. Waits for it."""
        if self.work:
            self.work.wait()
        return self.tensor.tolist()


@dataclass(frozen=True)
class World:
    """This process's rank, the number of processes, its device, and the collectives of all ranks."""

    rank: int
    size: int
    device: torch.device
    # How long a rank waits for the others in a collective.
    timeout: timedelta = TIMEOUT
    # The signals that ranks leave each other, outside collectives.
    signals: RankSignals = field(default=RankSignals(), compare=False, repr=False)

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: T, group: dist.ProcessGroup | None = None) -> T:
        """Rank 0's `value`, on every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=group)
        return box[0]

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.all_gather_object(None)

    def all_reduce_max(self, *values: int) -> list[int]:
        """For each value the largest of all ranks, on every rank. One reduction; does not wait for the device."""
        return self.all_reduce_max_async(*values).values()

    def one_hot_by_rank(self, value: int) -> list[int]:
        """A list of zeros with the value at this rank's index. Its `all_reduce_max` has the values of all ranks."""
        values = [0] * self.size
        values[self.rank] = value
        return values

    def all_reduce_sum_(self, tensor: Tensor) -> None:
        """Sum a tensor over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def all_reduce_max_async(self, *values: int) -> AsyncReduction:
        """`all_reduce_max` in the background. All ranks start their reductions in the same order."""
        tensor = torch.tensor(values)
        if self.size == 1:
            return AsyncReduction(tensor)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, self.cpu_group, async_op=True)
        assert work is not None
        return AsyncReduction(tensor, work)

    @cached_property
    def cpu_group(self) -> dist.ProcessGroup:
        """A CPU group of all ranks, for small messages: on the default group they would wait for the device.

        All ranks create it at the same point.
        """
        return self._gloo_group(self.timeout)

    @cached_property
    def checkpoint_group(self) -> dist.ProcessGroup:
        """A second CPU group, for the thread that writes checkpoints.

        On `cpu_group` its messages could be mistaken for a step's. All ranks create it with the first checkpoint. Its
        timeout is four times as long, for slow disks.
        """
        return self._gloo_group(4 * self.timeout)

    @cached_property
    def rank0_group(self) -> dist.ProcessGroup:
        """A CPU group on which rank 0 says that it still works. All ranks create it at the same point."""
        return self._gloo_group(self.timeout)

    def _gloo_group(self, timeout: timedelta) -> dist.ProcessGroup:
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def mesh(self) -> DeviceMesh:
        """All ranks, in one dimension."""
        return init_device_mesh(self.device.type, (self.size,))
