"""How ranks share columns: an exchange visits all blocks of columns, and returns each column's sums to its owner.

The forward pass collects log-sum-exps, joined by logaddexp; the backward pass collects feature gradients, joined by
addition. `sweep` is the one loop of both. No other file of the loss knows process groups.

Letters: P ranks; n rows (images) and m columns (texts) of one rank, the same on all; D feature width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from clipscale.loss.block import FeatureBlock

BLOCK_SPAN = "contrastive_loss: block"  # a span in a profiler's trace
WAIT_SPAN = "contrastive_loss: wait"
Visit = Callable[[FeatureBlock, int | None], None]  # computes our rows against these columns; int: Block.positive
Wait = Callable[[], list[Tensor]]  # waits for a transfer, and returns the tensors received


class Communicator:
    """The transfers of a process group."""

    @classmethod
    def of(cls, group: dist.ProcessGroup | DeviceMesh | None) -> "Communicator | None":
        """For a group, or a mesh of one dimension. None: the group is this process alone."""
        if not dist.is_initialized():
            return None
        if isinstance(group, DeviceMesh):
            group = group.get_group()
        if dist.get_rank(group) < 0:
            raise ValueError("this rank does not belong to the group that contrastive_loss was given")
        return cls(group) if dist.get_world_size(group) > 1 else None

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group or dist.group.WORLD
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def post(self, tensors: list[Tensor], peers: tuple[int, int], tag: int = 0) -> Wait:
        """Start to send the tensors to the first rank of `peers` and to receive the same shapes from the second. `tag`
        separates concurrent streams. Returns a function that waits for both and returns the received tensors."""
        assert self.group is not None  # where a process group is initialized, WORLD is one
        dest, src = (dist.get_global_rank(self.group, peer) for peer in peers)
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
        """Each rank's (n, ...) to (P n, ...), in rank order."""
        gathered = x.new_empty(self.size * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=self.group)
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Each rank's (P n, ...), summed over the ranks, to this rank's (n, ...)."""
        mine = x.new_empty(len(x) // self.size, *x.shape[1:])
        dist.reduce_scatter_tensor(mine, x, group=self.group)
        return mine

    def reduce_scatter_lse(self, x: Tensor) -> Tensor:
        """Log-sum-exps (P n,) of each rank, joined over ranks, to this rank's (n,): the maximum, then the sums.

        The maximum is finite: every column has pairs that count, if not on this rank.
        """
        largest = self.all_reduce_(x.clone(), dist.ReduceOp.MAX)
        mine = self.reduce_scatter((x - largest).exp_())
        return mine.log_().add_(largest[self.rank * len(mine) :][: len(mine)])

    def all_reduce_(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """x reduced over the ranks, in place."""
        dist.all_reduce(x, op, group=self.group)
        return x

    def grid(self, nodes: int) -> "tuple[Communicator, Communicator]":
        """Two subgroups: the ranks with this rank's local number in all nodes, and the ranks of its own node. The
        group's ranks must be numbered node by node."""
        assert self.group is not None
        return _grid(self.group, nodes)

    def agree(self, facts: dict[str, int], device: torch.device) -> None:
        """Raise ValueError if the ranks differ in one of the facts: their transfers would not match, and hang."""
        gathered = self.all_gather(torch.tensor([*facts.values()], device=device)).view(self.size, -1)
        for name, values in zip(facts, gathered.T.tolist()):
            if len(set(values)) > 1:
                raise ValueError(
                    f"contrastive_loss needs the same {name} on all ranks, but rank by rank it is {values}"
                )


class AllRows(torch.autograd.Function):
    """(this rank's rows, communicator) -> all ranks' rows. Backward takes this rank's slice, unsummed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return comm.all_gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.comm.size)[ctx.comm.rank], None


@cache
def _grid(group: dist.ProcessGroup, nodes: int) -> tuple[Communicator, Communicator]:
    ranks = dist.get_process_group_ranks(group)
    size = len(ranks) // nodes  # ranks of a node
    groups = []
    for split in ([ranks[i::size] for i in range(size)], [ranks[i : i + size] for i in range(0, len(ranks), size)]):
        mine, _ = dist.new_subgroups_by_enumeration(split)
        assert isinstance(mine, dist.ProcessGroup)
        groups.append(Communicator(mine))
    return groups[0], groups[1]


@cache
def of_rank0(group: dist.ProcessGroup, number: int, device: torch.device) -> int:
    """Rank 0's number, on all ranks of the group. They send it once."""
    sent = torch.tensor(number, device=device)
    dist.broadcast(sent, group=group, group_src=0)
    return int(sent)


@dataclass(frozen=True)
class ColumnReduction:
    """How a sweep reduces one value of each column."""

    field: str  # the FeatureBlock's
    empty: Callable[[FeatureBlock], Tensor]
    combine: Callable[..., Tensor]  # adds one part to another, with `out=`
    reduce_scatter: Callable[[Communicator, Tensor], Tensor]  # reduces the parts of all ranks


LOG_SUM_EXP = ColumnReduction("lse", FeatureBlock.empty_lse, torch.logaddexp, Communicator.reduce_scatter_lse)
GRAD = ColumnReduction("grad", FeatureBlock.empty_grad, torch.add, lambda comm, partial: comm.reduce_scatter(partial))


def visit_block(
    cols: FeatureBlock, sums: Sequence[ColumnReduction], visit: Visit, positive: int | None
) -> list[Tensor]:
    """Visit one block of columns. Returns the visit's sums of them."""
    partials = [s.empty(cols) for s in sums]
    cols = replace(cols, **{s.field: partial for s, partial in zip(sums, partials)})
    with record_function(BLOCK_SPAN):
        visit(cols, positive)
    return partials


class Exchange:
    """The exchange of one process: its rows against its columns. The base of the others."""

    size = 1

    def sweep(self, cols: FeatureBlock, sums: Sequence[ColumnReduction], visit: Visit) -> list[Tensor]:
        """Visit the columns of all ranks, given this rank's. Returns each sum of this rank's columns."""
        return visit_block(cols, sums, visit, 0)

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks."""
        return x


class GroupExchange(Exchange):
    """What the exchanges of several ranks share."""

    def __init__(self, communicator: Communicator) -> None:
        self.comm = communicator
        self.size = communicator.size

    def total(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce_(x.clone())

    def gathered(self, block: FeatureBlock) -> FeatureBlock:
        """The blocks of all ranks, in rank order."""
        gathered_block = block.received([self.comm.all_gather(x) for x in block.sent()])
        gathered_block.weight = None if block.weight is None else block.weight.repeat(self.size)
        return gathered_block


class Gather(GroupExchange):
    """A rank's rows against all columns: all-gather, reduce-scatter of their sums (DisCo-CLIP, arXiv 2304.08480)."""

    def sweep(self, cols: FeatureBlock, sums: Sequence[ColumnReduction], visit: Visit) -> list[Tensor]:
        partials = visit_block(self.gathered(cols), sums, visit, positive=self.comm.rank * len(cols))
        return [s.reduce_scatter(self.comm, partial) for s, partial in zip(sums, partials)]


class Ring(GroupExchange):
    """Rows stay. Columns travel from rank to rank, and their sums follow one hop behind."""

    def __init__(
        self, communicator: Communicator, ring: Communicator | None = None, inner: Exchange | None = None
    ) -> None:
        """`ring`: the ranks between which columns travel; None: all. `inner`: visits the columns that have arrived."""
        super().__init__(communicator)
        self.ring = ring or communicator
        self.inner = inner or Exchange()

    @classmethod
    def between_nodes(cls, communicator: Communicator, nodes: int) -> "Ring":
        """Columns travel between ranks of equal local number, and each node gathers its ranks' columns. A collective
        of the group."""
        ring, node = communicator.grid(nodes)
        return cls(communicator, ring, Gather(node) if node.size > 1 else None)

    def sweep(self, cols: FeatureBlock, sums: Sequence[ColumnReduction], visit: Visit) -> list[Tensor]:
        pending_sums: Wait | None = None
        ring = self.ring
        peers = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
        for number in range(ring.size):  # after which the sums are back
            pending_columns = ring.post(cols.sent(), peers) if number < ring.size - 1 else None
            partials = self.inner.sweep(cols, sums, visit if number == 0 else lambda cols, _: visit(cols, None))
            if partials:
                for s, partial, before in zip(sums, partials, pending_sums() if pending_sums else []):
                    s.combine(partial, before, out=partial)
                pending_sums = ring.post(partials, peers, tag=1)
            if pending_columns is not None:
                cols = cols.received(pending_columns())
        return pending_sums() if pending_sums else []
