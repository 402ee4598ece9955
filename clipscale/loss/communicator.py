"""The transfers of a process group. All transfers of features between ranks are here: the other files of the loss only
pass a group on.

Letters: P ranks; n rows of one rank, the same number on all.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

WAIT_SPAN = "contrastive_loss: wait"  # a span in a profiler's trace
Arguments = ParamSpec("Arguments")
T = TypeVar("T")
# Waits for a transfer, and returns the tensors received.
WaitFn = Callable[[], list[Tensor]]


class Communicator:
    """The transfers of a process group."""

    @classmethod
    def for_group(cls, group: dist.ProcessGroup | DeviceMesh | None) -> "Communicator | None":
        """The transfers of a group, or of a mesh of one dimension. None if the group is this process alone."""
        if not dist.is_initialized():
            return None
        if isinstance(group, DeviceMesh):
            group = group.get_group()
        if dist.get_rank(group) < 0:
            raise ValueError("this rank does not belong to the group that the loss was given")
        return cls(group) if dist.get_world_size(group) > 1 else None

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group or dist.group.WORLD
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def start_send_receive(self, tensors: list[Tensor], peers: tuple[int, int], tag: int = 0) -> WaitFn:
        """Start to send the tensors to the first rank of `peers` and to receive the same shapes from the second. `tag`
        separates concurrent streams. Returns a function that waits for both and returns the received tensors."""
        assert self.group is not None  # where a process group is initialized, WORLD is one
        send_to, receive_from = peers
        dest = dist.get_global_rank(self.group, send_to)
        src = dist.get_global_rank(self.group, receive_from)
        received = [torch.empty_like(x) for x in tensors]
        sends = [dist.P2POp(dist.isend, x, dest, self.group, tag) for x in tensors]
        receives = [dist.P2POp(dist.irecv, x, src, self.group, tag) for x in received]
        transfers = dist.batch_isend_irecv(sends + receives)

        def wait(sent: list[Tensor] = tensors) -> list[Tensor]:  # these live until they have been sent
            with record_function(WAIT_SPAN):
                for transfer in transfers:
                    transfer.wait()
            return received

        return wait

    def all_gather(self, x: Tensor) -> Tensor:
        """A collective: the x of all ranks, (P n, ...) in rank order, from each rank's (n, ...)."""
        gathered = x.new_empty(self.size * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=self.group)
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """A collective: this rank's (n, ...) of the sum over ranks of their (P n, ...)."""
        mine = x.new_empty(len(x) // self.size, *x.shape[1:])
        dist.reduce_scatter_tensor(mine, x, group=self.group)
        return mine

    def reduce_scatter_lse(self, x: Tensor) -> Tensor:
        """Join the ranks' log-sum-exps (P n,) by logaddexp; returns this rank's part, (n,). Two collectives.

        The maximum is finite: every column has pairs that count, if not on this rank.
        """
        largest = self.all_reduce_(x.clone(), dist.ReduceOp.MAX)
        mine = self.reduce_scatter((x - largest).exp_())
        return mine.log_().add_(largest[self.rank * len(mine) :][: len(mine)])

    def all_reduce_(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """A collective: x reduced over the ranks, in place."""
        dist.all_reduce(x, op, group=self.group)
        return x

    def split_by_node(self, nodes: int, timeout: timedelta | None = None) -> "tuple[Communicator, Communicator]":
        """A collective: two subgroups, the ranks with this local rank in all nodes, and the ranks of this node.

        The group's ranks must be numbered node by node. `timeout`: of the subgroups' collectives; None for torch's.
        """
        assert self.group is not None
        return _subgroups(self.group, nodes, timeout)

    def check_same_on_all_ranks(self, facts: dict[str, int], device: torch.device, function: str) -> None:
        """A collective. Raises ValueError if the ranks differ in one of the facts: their transfers would hang.

        `function`: the public function that needs them to be the same, for the message.
        """
        gathered = self.all_gather(torch.tensor([*facts.values()], device=device)).view(self.size, -1)
        for name, values in zip(facts, gathered.T.tolist()):
            if len(set(values)) > 1:
                raise ValueError(f"{function} needs the same {name} on all ranks, but rank by rank it is {values}")


class AllGatherRows(torch.autograd.Function):
    """(this rank's rows, communicator) -> all ranks' rows. Backward takes this rank's slice, unsummed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return comm.all_gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.comm.size)[ctx.comm.rank], None


def cached_by_group(
    function: "Callable[Concatenate[dist.ProcessGroup, Arguments], T]",
) -> "Callable[Concatenate[dist.ProcessGroup, Arguments], T]":
    """Caches what a function returns for a group and further arguments, as long as the group lives.

    functools.cache would keep groups that have been destroyed, and their threads and sockets.
    """
    results: WeakKeyDictionary[dist.ProcessGroup, dict[object, T]] = WeakKeyDictionary()

    @wraps(function)
    def cached(group: dist.ProcessGroup, *args: Arguments.args, **kwargs: Arguments.kwargs) -> T:
        results_of_group = results.setdefault(group, {})
        key = args, tuple(kwargs.items())
        if key not in results_of_group:
            results_of_group[key] = function(group, *args, **kwargs)
        return results_of_group[key]

    return cached


@cached_by_group
def _subgroups(group: dist.ProcessGroup, nodes: int, timeout: timedelta | None) -> tuple[Communicator, Communicator]:
    ranks = dist.get_process_group_ranks(group)
    node_size = len(ranks) // nodes
    by_local_rank = [ranks[i::node_size] for i in range(node_size)]
    by_node = [ranks[i : i + node_size] for i in range(0, len(ranks), node_size)]
    return _make_subgroups(by_local_rank, timeout), _make_subgroups(by_node, timeout)


def _make_subgroups(ranks_of_groups: list[list[int]], timeout: timedelta | None) -> Communicator:
    """A collective: makes these groups. Returns this rank's."""
    mine, _ = dist.new_subgroups_by_enumeration(ranks_of_groups, timeout=timeout)
    assert isinstance(mine, dist.ProcessGroup)
    return Communicator(mine)


@cached_by_group
def broadcast_from_rank0(group: dist.ProcessGroup, value: int, device: torch.device) -> int:
    """A collective the first time: rank 0's value, on all ranks of the group. Later calls return it from the cache."""
    received = torch.tensor(value, device=device)
    dist.broadcast(received, group=group, group_src=0)
    return int(received)
