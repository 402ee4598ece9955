"""Process groups, towers under DDP, and communication between ranks."""

import os
import resource
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from inspect import signature
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from clipscale.common import ranks
from clipscale.common.errors import UserError
from clipscale.common.hardware import cores
from clipscale.common.modules import trains
from clipscale.distributed.fsdp import ZERO_STAGES, shard_tower

T = TypeVar("T")

# How long a rank waits for the others, which may be loading models.
TIMEOUT = timedelta(minutes=30)
# Seconds between rank 0's checks of which ranks have joined.
JOIN_POLL_S = 0.05
# Time limit in seconds of the store's answer about signals.
SIGNAL_S = 5.0
# The store's key of the signal that a rank has left for the others.
SIGNAL = "signal"


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
    """This process's rank, the number of processes, and its device."""

    rank: int
    size: int
    device: torch.device
    # How long a rank waits for the others in a collective.
    timeout: timedelta = TIMEOUT
    # The store in which ranks leave each other signals; None with one process. It has a connection of its own, since a
    # rank that waits may be using the others.
    signal_store: dist.Store | None = field(default=None, compare=False, repr=False)
    # Errors that every rank raises, at the same place. Weak references: an error holds the frames that it has left.
    shared_errors: WeakSet[UserError] = field(default_factory=WeakSet, compare=False, repr=False)

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

    def all_reduce_max(self, *values: int) -> list[int]:
        """For each value the largest of all ranks, on every rank. One reduction; does not wait for the device."""
        return self.all_reduce_max_async(*values).values()

    def one_hot(self, value: int) -> list[int]:
        """A list of zeros with the value at this rank's index. Its `all_reduce_max` has the values of all ranks."""
        values = [0] * self.size
        values[self.rank] = value
        return values

    def sum_(self, tensor: Tensor) -> None:
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

    def _gloo_group(self, timeout: timedelta) -> dist.ProcessGroup:
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def run_on_rank0(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0 alone. Returns its result, or raises its UserError, on all ranks. A collective."""
        box: list[Any] = [self.raise_together(lambda: work() if self.is_rank0 else None)]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def raise_together(self, work: Callable[[], T]) -> T:
        """Call `work` on every rank, and gather the ranks' errors. A collective. Returns this rank's result.

        If any rank raises UserError, every rank raises the first of them.
        """
        problem: UserError | None = None
        try:
            result = work()
        except UserError as error:
            problem = error
        for error_of_rank in self.all_gather_object(problem):
            if error_of_rank:
                self.raise_on_all_ranks(error_of_rank)
        return result

    def raise_on_all_ranks(self, error: UserError) -> NoReturn:
        """Raise an error that every rank raises, at the same place; see `is_raised_on_all_ranks`."""
        self.shared_errors.add(error)
        raise error

    def is_raised_on_all_ranks(self, error: Exception) -> bool:
        """Whether every rank raises this error at the same place, so that a collective may follow."""
        return self.size == 1 or error in self.shared_errors

    def leave_signal(self, signal_number: int) -> None:
        """Leave a signal for the ranks that ask. Safe in any thread."""
        if self.signal_store:
            with suppress(RuntimeError):  # the rank that hosts the store has ended, and with it the run
                self.signal_store.set(SIGNAL, str(signal_number))

    def left_signal(self) -> int:
        """The signal that a rank has left; 0 without one."""
        if self.signal_store:
            with suppress(RuntimeError):  # as in `leave_signal`
                return int(self.signal_store.get(SIGNAL)) if self.signal_store.check([SIGNAL]) else 0
        return 0

    def sum_gradients(self, parameters: Iterable[nn.Parameter | None]) -> None:
        """Sum over ranks the gradients of parameters outside DDP and FSDP2."""
        for p in parameters:
            if p is not None and p.grad is not None:
                self.sum_(p.grad)

    def mesh(self) -> DeviceMesh:
        """All ranks, in one dimension."""
        return init_device_mesh(self.device.type, (self.size,))

    def wrap(self, tower: nn.Module, parallel: str = "ddp", dtype: torch.dtype = torch.float32) -> nn.Module:
        """The tower under DDP or FSDP2. Gradients are SUMMED, not averaged: each rank has a share of the gradient.

        A frozen tower is returned as it is. Batch normalisation is synchronised on GPUs; torch cannot on CPUs. FSDP2
        (`zero2`, `zero3`) changes the module in place; `dtype`: see shard_tower.
        """
        if self.size == 1 or not trains(tower):
            return tower
        if self.device.type == "cuda":
            tower = convert_sync_batchnorm(tower)
        if parallel in ZERO_STAGES:
            return shard_tower(tower, self.mesh(), ZERO_STAGES[parallel], dtype)
        ids = [self.device.index] if self.device.type == "cuda" else None
        constant_buffers: dict[str, Any] = {_BROADCASTS_BUFFERS: False}
        wrapped = DistributedDataParallel(tower, device_ids=ids, gradient_as_bucket_view=True, **constant_buffers)
        wrapped.register_comm_hook(None, _sum)
        return wrapped


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Global Euclidean norm of all gradients, sharded or not: 0-d, the same on every rank, 0 without gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = []
    for sharded in (True, False):
        group = [g for g in gradients if isinstance(g, DTensor) == sharded]
        if group:
            norm = torch.nn.utils.get_total_norm(group)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return torch.stack(norms).norm() if norms else torch.zeros(())


# DDP's switch to broadcast buffers in every forward pass, which torch has renamed. The towers' buffers are constants.
_BROADCASTS_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)


def _sum(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's hook for a bucket of gradients: sums it over ranks."""
    reduced = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return reduced.then(lambda future: future.value()[0])


def init_world(device: str, timeout_s: float = TIMEOUT.total_seconds()) -> World:
    """Join the process group of the ranks in torchrun's environment variables. Without these: one process alone.

    `timeout_s`: how long a rank waits for the others. Raises UserError if the requested device does not exist.
    """
    rank = ranks.rank()
    size = ranks.size()
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: torch sees no CUDA device here; use device=cpu or fix the driver")
    chosen = torch.device("cpu")
    timeout = timedelta(seconds=timeout_s)
    if device != "cpu" and torch.cuda.is_available():
        local_rank = ranks.local_rank()
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"launch.procs: local rank {local_rank} has no GPU of its own ({torch.cuda.device_count()} visible)"
            )
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores())
    signal_store = None
    if size > 1 and not dist.is_initialized():
        allow_open_files()
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # the ring's transfers start while kernels fill the GPU
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # connects two ranks when they first communicate
        backend, bound = ("nccl", chosen) if chosen.type == "cuda" else ("gloo", None)
        store, signal_store = attempt_store(rank, size, timeout)
        # With device_id NCCL connects now, not in the first step.
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size, device_id=bound)
    return World(rank, size, chosen, timeout, signal_store)


def attempt_store(rank: int, size: int, timeout: timedelta) -> tuple[dist.Store, dist.Store]:
    """The store of the ranks of this attempt, and a second connection to it, for signals.

    torchrun's store survives a restart and still has the old ranks' addresses, so each attempt needs a prefix of its
    own. The restart count cannot be the prefix: machines disagree on it after an agent itself has restarted. So rank 0
    picks a random prefix, and the other ranks ask for it. Without torchrun rank 0 opens the store. Raises UserError if
    a rank does not ask in time.
    """
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    rank0_hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(address, port, is_master=rank0_hosts_store and rank == 0, timeout=timeout)
    prefix = agree_on_prefix(store, rank, size, timeout)
    signal_store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    signal_store.set_timeout(timedelta(seconds=SIGNAL_S))
    return dist.PrefixStore(prefix, store), dist.PrefixStore(prefix, signal_store)


def agree_on_prefix(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """The prefix of this attempt, which all ranks agree on. Raises UserError if a rank does not ask in time."""
    name = uuid.uuid4().hex
    if rank:
        store.set(f"asks/{rank}", name)
        start = store.get(f"answers/{name}").decode()
        store.add(f"{start}/joined", 1)
        return start
    deadline = time.monotonic() + timeout.total_seconds()
    while store.add(f"{name}/joined", 0) < size - 1:
        if time.monotonic() > deadline:
            raise UserError(f"launch.timeout_s: not all of {size} ranks came within {timeout.total_seconds():g} s")
        for other in range(1, size):
            # The question may be left from the last attempt. Then the rank of this attempt asks again.
            if store.check([f"asks/{other}"]):
                store.set(f"answers/{store.get(f'asks/{other}').decode()}", name)
        time.sleep(JOIN_POLL_S)
    return name


def allow_open_files() -> None:
    """Raise this process's limit of open files and sockets as far as the system allows.

    Many systems start at 1024: too few for rank 0 of 512, to which all others connect for a checkpoint.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def destroy_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
