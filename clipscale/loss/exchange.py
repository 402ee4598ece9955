"""How ranks meet: who sees whose columns, and how what they add to them comes home.

Each exchange has one loop, `sweep`, used in both passes: it visits blocks of columns and joins what the visits leave behind for
each column: log-sum-exps (`lse`, joined by logaddexp) in the forward pass, feature gradients (`grad`, joined by addition) in the backward.
This is the only file of the loss that knows process groups.

Letters: P ranks; n rows (images) and m columns (texts) of one rank, the same on all; D feature width.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from clipscale.loss.block import Side

Fresh = Callable[[Side], Tensor | None]  # the empty sums for some columns; None: nothing is collected
Visit = Callable[[Side, int | None], None]  # works on the rows against these columns; the number is Block.positive
Hop = tuple[int, int]  # (rank to send to, rank to receive from)
JOIN: dict[str, Callable[..., Tensor]] = {"lse": torch.logaddexp, "grad": torch.add}


class Transfer:
    """One exchange of tensors between neighbours, under way."""

    def __init__(self, works: list[dist.Work], sent: list[Tensor], received: list[Tensor]) -> None:
        self._works, self._sent, self._received = works, sent, received  # what is sent must live until it is

    def wait(self) -> list[Tensor]:
        """What has been received, once both ways are done."""
        for work in self._works:
            work.wait()
        return self._received


class Communicator:
    """The transfers of one process group. Counts the bytes that this process sends (a collective as its ring algorithm would)."""

    bytes_sent: ClassVar[int] = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "Communicator | None":
        """The group's transfers; None where there is only this process. Raises ValueError on a rank outside of the group."""
        if not dist.is_available() or not dist.is_initialized():
            return None
        if dist.get_rank(group) < 0:
            raise ValueError("this rank does not belong to the group that contrastive_loss was given")
        return cls(group) if dist.get_world_size(group) > 1 else None

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group: dist.ProcessGroup = dist.distributed_c10d._get_default_group() if group is None else group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def post(self, tensors: list[Tensor], hop: Hop, tag: int = 0) -> Transfer:
        """Start sending the tensors to one rank and receiving their like from another; `tag` keeps two streams of transfers apart."""
        dest, src = (dist.get_global_rank(self.group, peer) for peer in hop)
        received = [torch.empty_like(x) for x in tensors]
        sends = [dist.P2POp(dist.isend, x, dest, self.group, tag) for x in tensors]
        receives = [dist.P2POp(dist.irecv, x, src, self.group, tag) for x in received]
        Communicator.bytes_sent += sum(x.nbytes for x in tensors)
        return Transfer(dist.batch_isend_irecv(sends + receives), tensors, received)

    def gather(self, x: Tensor) -> Tensor:
        """(n, ...) of each rank to (P n, ...) in rank order."""
        everyone = x.new_empty(self.size * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(everyone, x.contiguous(), group=self.group)
        Communicator.bytes_sent += (self.size - 1) * x.nbytes
        return everyone

    def scatter(self, x: Tensor, field: str) -> Tensor:
        """(P n, ...) of each rank, joined over the ranks, to this rank's (n, ...)."""
        own = x.new_empty(len(x) // self.size, *x.shape[1:])
        if field == "lse":  # no such reduction exists: the largest of all ranks first, then the sum of exponentials
            largest = self.reduce(x.clone(), dist.ReduceOp.MAX).clamp_min(torch.finfo(x.dtype).min)
            x = (x - largest).exp_()
        dist.reduce_scatter_tensor(own, x, group=self.group)
        Communicator.bytes_sent += (self.size - 1) * own.nbytes
        return own.log_().add_(largest[self.rank * len(own) :][: len(own)]) if field == "lse" else own

    def reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """x reduced over the ranks, in place."""
        dist.all_reduce(x, op, group=self.group)
        Communicator.bytes_sent += 2 * (self.size - 1) * x.nbytes // self.size
        return x


class Single:
    """One process: its rows against its columns."""

    size = 1
    visits = 1  # of each row in one sweep
    share = 1.0  # this rank's part of what it computes for tensors that all ranks have

    def spread(self, rows: Side, cols: Side) -> tuple[Side, Side]:
        """The rows and columns that this rank works on, given its own."""
        return rows, cols

    def own(self, rows: Tensor) -> Tensor:
        """This rank's part of something computed for the spread rows."""
        return rows

    def own_cols(self, cols: Tensor) -> Tensor:
        """This rank's part of something computed for the spread columns."""
        return cols

    def sweep(self, cols: Side, field: str, fresh: Fresh, visit: Visit) -> Tensor | None:
        """Visit all columns there are; return what was collected in `field` for this rank's columns."""
        part = fresh(cols)
        visit(cols.collecting(field, part), 0)
        return part

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks."""
        return x


class Grouped(Single):
    """What the exchanges of more than one rank share."""

    def __init__(self, communicator: Communicator) -> None:
        self.comm = communicator
        self.size, self.rank = communicator.size, communicator.rank

    def total(self, x: Tensor) -> Tensor:
        return self.comm.reduce(x.clone())

    def gathered(self, side: Side) -> Side:
        """The side's counterparts of all ranks, in rank order. Weights are the same on all."""
        everyone = side.arrived([self.comm.gather(x) for x in side.travelling()])
        everyone.weight = None if side.weight is None else side.weight.repeat(self.size)
        return everyone


class Replicated(Grouped):
    """CLIP's own way: every rank gathers everything and computes the loss of the whole batch; it keeps its rows' gradient."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator)
        self.share = 1 / self.size

    def spread(self, rows: Side, cols: Side) -> tuple[Side, Side]:
        self._n, self._m = n, m = len(rows), len(cols)
        rows, cols = self.gathered(rows), self.gathered(cols)
        if m > n:  # all positives first, then the hard negatives of all ranks
            index = torch.arange(self.size * m, device=cols.features.device).view(self.size, m)
            order = torch.cat([index[:, :n].flatten(), index[:, n:].flatten()])
            cols = cols.map(lambda x: x[order])
        return rows, cols

    def own(self, rows: Tensor) -> Tensor:
        return rows[self.rank * self._n :][: self._n]

    def own_cols(self, cols: Tensor) -> Tensor:
        positives, extra = self.own(cols), self._m - self._n
        if not extra:
            return positives
        return torch.cat([positives, cols[self.size * self._n + self.rank * extra :][:extra]])


class Gather(Grouped):
    """Own rows against everybody's columns: all-gather of the columns, reduce-scatter of what they collect.

    The gradient's way home is that of DisCo-CLIP (arXiv 2304.08480).
    """

    def sweep(self, cols: Side, field: str, fresh: Fresh, visit: Visit) -> Tensor | None:
        own = len(cols)
        cols = self.gathered(cols)
        part = fresh(cols)
        visit(cols.collecting(field, part), self.rank * own)
        return None if part is None else self.comm.scatter(part, field)


class Ring(Grouped):
    """Rows stay, columns travel from rank to rank, and so does, one hop behind them, what they have collected."""

    def __init__(self, communicator: Communicator, ranks_per_node: int | None = None) -> None:
        super().__init__(communicator)
        self.visits = self.size
        self.hops = ring_hops(self.rank, self.size, ranks_per_node or self.size)

    def sweep(self, cols: Side, field: str, fresh: Fresh, visit: Visit) -> Tensor | None:
        behind: Transfer | None = None
        for number, hop in enumerate(self.hops, start=1):
            ahead = self.comm.post(cols.travelling(), hop) if number < self.size else None
            part = fresh(cols)
            visit(cols.collecting(field, part), 0 if number == 1 else None)
            if part is not None:
                if behind is not None:
                    JOIN[field](part, behind.wait()[0], out=part)
                behind = self.comm.post([part], hop, tag=1)
            if ahead is not None:
                cols = cols.arrived(ahead.wait())
        return None if behind is None else behind.wait()[0]


def ring_hops(rank: int, size: int, ranks_per_node: int) -> list[Hop]:
    """The hops, seen from `rank`, that take every rank's columns to every rank once and then home.

    Columns first make the round of their node; then they move to the next node, to the rank with the same local index (so that
    each network card has one neighbour), and so on; the last hop leads home. With all ranks on one node it is the plain ring.
    Raises ValueError where `ranks_per_node` does not divide the number of ranks.
    """
    if ranks_per_node < 1 or size % ranks_per_node:
        raise ValueError(f"ranks_per_node={ranks_per_node} must divide the {size} ranks of the group")
    nodes = size // ranks_per_node

    def moved(start: int, node_steps: int, local_steps: int) -> int:
        node, local = divmod(start, ranks_per_node)
        return (node + node_steps) % nodes * ranks_per_node + (local + local_steps) % ranks_per_node

    inside, between = (0, 1), (1, 0)
    steps = [between if number % ranks_per_node == 0 else inside for number in range(1, size)]
    home = (-sum(node for node, _ in steps), -sum(local for _, local in steps))
    return [(moved(rank, *step), moved(rank, -step[0], -step[1])) for step in [*steps, home]]


def agree(
    comm: Communicator, facts: Sequence[int], names: Sequence[str], problem: Exception | None, device: torch.device
) -> None:
    """Raise ValueError if another rank has a problem, or if the ranks differ in any of the named facts.

    One small all-gather: without it a rank that raises its problem, or that brings another batch size, leaves the others waiting for ever.
    """
    mine = torch.tensor([problem is not None, *facts], dtype=torch.int64, device=device)
    everyone = comm.gather(mine).view(comm.size, -1).tolist()
    if problem is not None:
        return
    if faulty := [str(rank) for rank, (failed, *_) in enumerate(everyone) if failed]:
        raise ValueError(
            f"contrastive_loss was refused on rank {', '.join(faulty)} of the group; the reason is in the error there"
        )
    for name, values in zip(names, list(zip(*everyone))[1:]):
        if len(set(values)) > 1:
            raise ValueError(
                f"contrastive_loss needs the same {name} on all ranks, but rank by rank it is {list(values)}"
            )
