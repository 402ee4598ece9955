"""Process groups, data-parallel towers, and communication between ranks."""

import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property
from inspect import signature
from ipaddress import ip_address
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from clipscale.common.errors import LostRankError, UserError
from clipscale.distributed.fsdp import STAGE_3, ShardedTower, Sharding
from clipscale.distributed.sums import GradientSum, begin_sums

T = TypeVar("T")


class Later:
    """The result of a reduction that goes on in the background."""

    def __init__(self, tensor: Tensor, work: dist.Work) -> None:
        self._tensor, self._work = tensor, work

    def values(self) -> list[int]:
        """Wait for the result."""
        self._work.wait()
        return [int(value) for value in self._tensor.tolist()]


TIMEOUT = timedelta(minutes=30)
"""What a process waits for the others, which may be loading models."""


@dataclass(frozen=True)
class World:
    """This process's rank, the number of processes, and its device."""

    rank: int
    size: int
    device: torch.device
    timeout: timedelta = TIMEOUT
    """What a process waits for the others in a collective."""

    @property
    def main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows of every rank, equally many on each, joined in rank order, on every rank."""
        if self.size == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    def highest(self, *values: int) -> list[int]:
        """The largest of every rank's values, one by one, on every rank. One reduction, which does not wait for the device."""
        return self.highest_later(*values).values() if self.size > 1 else list(values)

    def highest_later(self, *values: int) -> Later:
        """`highest` in the background, over several ranks."""
        tensor = torch.tensor(values)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, self.control, async_op=True)
        assert work is not None
        return Later(tensor, work)

    @cached_property
    def control(self) -> dist.ProcessGroup:
        """All ranks on the CPU, beside the group of the features and gradients. All ranks make it at the same place."""
        return self._on_cpu(self.timeout)

    @cached_property
    def background(self) -> dist.ProcessGroup:
        """The same for a thread that writes checkpoints. A slow disk may take four times as long as ranks wait for each other otherwise."""
        return self._on_cpu(4 * self.timeout)

    def _on_cpu(self, timeout: timedelta) -> dist.ProcessGroup:
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value` on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def on_main(self, work: Callable[[], T]) -> T:
        """The result of `work`, which rank 0 does while the others wait. Raises its UserError on every rank."""
        result, failure = None, None
        if self.main:
            try:
                result = work()
            except UserError as error:
                failure = str(error)
        answer, failure = self.broadcast((result, failure))
        if failure:
            raise UserError(failure)
        return answer

    def on_all(self, work: Callable[[], T]) -> T:
        """The result of `work`, which every rank does for itself. Raises the UserError of one rank on every rank."""
        problem = ""
        try:
            result = work()
        except UserError as error:
            problem = str(error)
        problems = [one for one in self.gather(problem) if one]
        if problems:
            raise UserError(problems[0])
        return result

    def begin_sums(self, parameters: Iterable[nn.Parameter]) -> list[GradientSum]:
        """Begin to sum gradients over ranks, of parameters outside DDP and FSDP2. Wait for the sums before reading them."""
        return begin_sums(parameters) if self.size > 1 else []

    def mesh(self) -> DeviceMesh:
        """All ranks in one dimension, for FSDP2."""
        return init_device_mesh(self.device.type, (self.size,))

    def wrap(self, tower: nn.Module, parallel: str = "ddp", sharding: Sharding = STAGE_3) -> nn.Module:
        """The tower under DDP or FSDP2, with gradients SUMMED over ranks, since each rank's loss gradient is a share of the whole.

        A frozen tower is returned as it is; `none` leaves the sum to others. Batch normalisation is synchronised. FSDP2 changes
        the module in place and shards block by block, as `sharding` says.
        """
        if self.size == 1 or not any(p.requires_grad for p in tower.parameters()):
            return tower
        tower = sync_batch_norm(tower)
        if parallel == "none":
            return tower
        if parallel == "fsdp":
            return ShardedTower(tower, self.mesh(), sharding)
        ids = [self.device.index] if self.device.type == "cuda" else None
        constant_buffers: dict[str, Any] = {_BUFFERS: False}
        wrapped = DistributedDataParallel(tower, device_ids=ids, gradient_as_bucket_view=True, **constant_buffers)
        wrapped.register_comm_hook(None, _sum)
        return wrapped


def sync_batch_norm(module: nn.Module) -> nn.Module:
    """Make the module's batch normalisation, in place, compute its statistics over all ranks; returns the module.

    Subclasses of torch's layers, such as timm's, are left as they are.
    """
    for layer in module.modules():
        if type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            on_cpu = all(tensor.device.type == "cpu" for tensor in (*layer.parameters(), *layer.buffers()))
            vars(layer)["process_group"] = None  # the whole world
            layer.__class__ = SyncBatchNorm if on_cpu else nn.SyncBatchNorm
    return module


class SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over ranks. Its gradient is a share on every rank, so the backward pass sums it too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return SumOverRanks.forward(ctx, gradient)


class SyncBatchNorm(_BatchNorm):
    """SyncBatchNorm for the CPU; torch's own needs a GPU.

    The output of every rank depends on a statistic, so the statistic's gradient is summed over ranks.
    """

    synchronised = True

    def _check_input_dim(self, x: Tensor) -> None:
        """Accepts any number of dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and dist.is_initialized()):
            return super().forward(x)
        dims = [0, *range(2, x.ndim)]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        count = torch.tensor(float(x.numel() // x.shape[1]))
        dist.all_reduce(count)
        mean = SumOverRanks.apply(x.sum(dims)) / count
        centred = x - mean.view(shape)
        variance = SumOverRanks.apply(centred.square().sum(dims)) / count
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                rate = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
                self.running_var.lerp_((variance * count / (count - 1)).to(self.running_var.dtype), rate)
        out = centred * (variance + self.eps).rsqrt().view(shape)
        return out if self.weight is None else out * self.weight.view(shape) + self.bias.view(shape)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or the whole of any other; changes to it change the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy a value, whole or sharded alike, into a tensor that may be sharded."""
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        mesh = target.device_mesh
        value = distribute_tensor(value.to(mesh.device_type), mesh, target.placements, src_data_rank=None)
    local(target).copy_(local(value))


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Global Euclidean norm of all gradients, sharded or not: 0-d, the same on every rank, 0 without gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    parts = []
    for sharded in (True, False):
        group = [g for g in gradients if isinstance(g, DTensor) == sharded]
        if group:
            norm = torch.nn.utils.get_total_norm(group)
            parts.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return torch.stack(parts).norm() if parts else torch.zeros(())


# Buffers are constants here, so DDP need not send them at every forward pass. torch has renamed this switch.
_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)


def _sum(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


STORE = "CLIPSCALE_STORE"
"""Names the file in which the processes of one machine meet."""


@cache
def store() -> dist.Store:
    """Where the processes of a run meet: a file that the launcher names, else torchrun's or the scheduler's address.

    Without torchrun's agent, rank 0 listens at MASTER_ADDR alone, unless other machines know this address by a name
    that means loopback here, as Debian's /etc/hosts does. torch unpickles what it finds in a store.
    """
    found: dist.Store
    rank, size, port = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if path := os.environ.get(STORE):
        found = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", dist.FileStore(path))
    elif rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not port:
        found = next(dist.rendezvous("env://", timeout=TIMEOUT))[0]
    else:
        name = os.environ["MASTER_ADDR"]
        family, *_, (address, *_) = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        everywhere = os.environ.get("LOCAL_WORLD_SIZE") != str(size) and ip_address(address).is_loopback
        listener = socket.create_server(("" if everywhere else str(address), port), family=family, backlog=size)
        found = dist.TCPStore(name, port, size, True, TIMEOUT, multi_tenant=True, master_listen_fd=listener.detach())
    found.set_timeout(TIMEOUT)
    return found


def start(device: str, timeout_s: float = TIMEOUT.total_seconds()) -> World:
    """Join the process group of torchrun's environment variables; without them, a world of one process.

    `timeout_s`: how long a rank waits for the others, here and in a collective. Raises UserError if the requested device does not exist,
    and LostRankError that names the ranks which have not come.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: torch sees no CUDA device here; use device=cpu or fix the driver")
    if device == "cpu" or not torch.cuda.is_available():
        chosen = torch.device("cpu")
    else:
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"launch.procs: local rank {local_rank} has no GPU of its own ({torch.cuda.device_count()} visible)"
            )
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
    if size > 1 and not dist.is_initialized():
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        join(backend, rank, size, timedelta(seconds=timeout_s))
    return World(rank, size, chosen, timedelta(seconds=timeout_s))


def join(backend: str, rank: int, size: int, timeout: timedelta) -> None:
    """Meet the other ranks in the store. Raises LostRankError that names those which have not come within the time-out."""
    own, here = dist.PrefixStore("group", store()), "here/{}".format
    own.set_timeout(timeout)
    own.set(here(rank), socket.gethostname())
    try:
        own.wait([here(other) for other in range(size)])
        dist.init_process_group(backend, timeout=timeout, store=own, rank=rank, world_size=size)
    except RuntimeError as error:  # also of the network
        come = [other for other in range(size) if own.check([here(other)])]
        missing = sorted({*range(size)} - {*come})
        if not missing:
            raise
        hosts = ", ".join(sorted({own.get(here(other)).decode() for other in come}))
        raise LostRankError(
            f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing[:8]))}{', ...' * (len(missing) > 8)} of {size} "
            f"did not start within launch.timeout_s={timeout.total_seconds():g}; the others are on {hosts}",
            first=rank == come[0],
        ) from error


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
