"""How ranks share columns: an exchange computes this rank's rows against the columns of all ranks, block by block.

A block's rows are reduced to one result for each column. The exchange joins a column's results over the rows of all
ranks, and returns them to the rank that owns the column.

The forward pass reduces log-sum-exps, by logaddexp; the backward pass reduces feature gradients, by addition. `sweep`
is the one loop of both. All transfers between ranks are here: the other files of the loss only pass a group on.

Letters: P ranks; n rows (images) and m columns (texts) of one rank, the same on all; D feature width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from clipscale.loss.block import BlockSide

BLOCK_SPAN = "contrastive_loss: block"  # a span in a profiler's trace
WAIT_SPAN = "contrastive_loss: wait"
Arguments = ParamSpec("Arguments")
T = TypeVar("T")
# Computes our rows against these columns, given their Block.positive_offset.
ComputeFn = Callable[[BlockSide, int | None], None]
# Waits for a transfer, and returns the tensors received.
WaitFn = Callable[[], list[Tensor]]


class Communicator:
    """The transfers of a process group."""

    @classmethod
    def of(cls, group: dist.ProcessGroup | DeviceMesh | None) -> "Communicator | None":
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

    def post(self, tensors: list[Tensor], peers: tuple[int, int], tag: int = 0) -> WaitFn:
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


@dataclass(frozen=True)
class ColumnReduction:
    """How a sweep reduces one value of each column: the log-sum-exps by logaddexp, the gradients by addition."""

    field: str  # of BlockSide: where a block function finds the tensor to add to
    initial: Callable[[BlockSide], Tensor]  # the value before any block
    combine: Callable[..., Tensor]  # joins the results of two blocks, with `out=`
    reduce_scatter: Callable[[Communicator, Tensor], Tensor]  # joins the results of all ranks


LOG_SUM_EXP = ColumnReduction("lse", BlockSide.initial_lse, torch.logaddexp, Communicator.reduce_scatter_lse)
GRAD = ColumnReduction(
    "grad", BlockSide.zero_grad_buffer, torch.add, lambda comm, partial: comm.reduce_scatter(partial)
)


def compute_block(
    cols: BlockSide, reductions: Sequence[ColumnReduction], compute: ComputeFn, positive_offset: int | None
) -> list[Tensor]:
    """Compute one block of columns. Returns its part of each reduction."""
    partials = [reduction.initial(cols) for reduction in reductions]
    fields = {reduction.field: partial for reduction, partial in zip(reductions, partials)}
    with record_function(BLOCK_SPAN):
        compute(replace(cols, **fields), positive_offset)
    return partials


class Exchange:
    """The exchange of one process: its rows against its columns. The base of the others."""

    size = 1

    def sweep(self, cols: BlockSide, reductions: Sequence[ColumnReduction], compute: ComputeFn) -> list[Tensor]:
        """A collective: compute this rank's rows against the columns of all ranks. `cols`: this rank's columns.

        Returns one tensor for each reduction, with the values of this rank's columns over the rows of all ranks.
        """
        return compute_block(cols, reductions, compute, positive_offset=0)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """A collective: the sum of x over the ranks."""
        return x


class GroupExchange(Exchange):
    """The base of the exchanges between several ranks."""

    def __init__(self, communicator: Communicator) -> None:
        self.comm = communicator
        self.size = communicator.size

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce_(x.clone())

    def gather_columns(self, cols: BlockSide) -> BlockSide:
        """A collective: the columns of all ranks as one side, in rank order."""
        gathered = cols.with_received([self.comm.all_gather(x) for x in cols.tensors_to_send()])
        gathered.lse_weight = None if cols.lse_weight is None else cols.lse_weight.repeat(self.size)
        return gathered


class Gather(GroupExchange):
    """All-gathers the columns, and reduce-scatters their sums (DisCo-CLIP, arXiv 2304.08480)."""

    def sweep(self, cols: BlockSide, reductions: Sequence[ColumnReduction], compute: ComputeFn) -> list[Tensor]:
        all_cols = self.gather_columns(cols)
        partials = compute_block(all_cols, reductions, compute, positive_offset=self.comm.rank * len(cols))
        return [reduction.reduce_scatter(self.comm, partial) for reduction, partial in zip(reductions, partials)]


class Ring(GroupExchange):
    """Rows stay. Columns travel from rank to rank, and their reductions follow one hop behind."""

    def __init__(
        self, communicator: Communicator, ring: Communicator | None = None, inner: Exchange | None = None
    ) -> None:
        """`ring`: the ranks between which columns travel; None for all. `inner`: runs the columns that have arrived."""
        super().__init__(communicator)
        self.ring = ring or communicator
        self.inner = inner or Exchange()

    @classmethod
    def between_nodes(cls, communicator: Communicator, nodes: int, timeout: timedelta | None = None) -> "Ring":
        """A collective of the group. Columns travel between ranks of equal local number, and each node gathers its
        ranks' columns. `timeout`: see `Communicator.split_by_node`."""
        ring, node = communicator.split_by_node(nodes, timeout)
        return cls(communicator, ring, Gather(node) if node.size > 1 else None)

    def sweep(self, cols: BlockSide, reductions: Sequence[ColumnReduction], compute: ComputeFn) -> list[Tensor]:
        ring = self.ring
        peers = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
        pending_sums: WaitFn | None = None

        def compute_without_positives(cols: BlockSide, _: int | None) -> None:
            compute(cols, None)  # columns of other rows

        # After as many hops as the ring has ranks the sums have returned to their columns' owner.
        for hop in range(ring.size):
            is_own = hop == 0
            is_last = hop == ring.size - 1
            pending_columns = None if is_last else ring.post(cols.tensors_to_send(), peers)
            partials = self.inner.sweep(cols, reductions, compute if is_own else compute_without_positives)
            if pending_sums is not None:
                for reduction, partial, before in zip(reductions, partials, pending_sums()):
                    reduction.combine(partial, before, out=partial)
            if partials:
                pending_sums = ring.post(partials, peers, tag=1)
            if pending_columns is not None:
                cols = cols.with_received(pending_columns())
        return pending_sums() if pending_sums is not None else []
