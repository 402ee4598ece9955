"""How ranks share columns: an exchange visits all blocks of columns and returns what they collected to their owners.

The forward pass collects log-sum-exps, joined by logaddexp; the backward pass collects feature gradients, joined by
addition. `sweep` is the one loop of both. No other file of the loss knows process groups.

Letters: P ranks; n rows (images) and m columns (texts) of one rank, the same on all; D feature width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from clipscale.loss.block import RowBlock

BLOCK, WAIT = "contrastive_loss: block", "contrastive_loss: wait"  # spans in a profiler's trace
Visit = Callable[[RowBlock, int | None], None]  # computes the rows against these columns; the number is Block.positive


@dataclass
class Transfer:
    """An exchange of tensors between neighbours that is under way."""

    works: list[dist.Work]
    sent: list[Tensor]  # which live until they have been sent
    received: list[Tensor]

    def wait(self) -> list[Tensor]:
        """The received tensors, once both directions are done."""
        with record_function(WAIT):
            for work in self.works:
                work.wait()
        return self.received


class Communicator:
    """The transfers of a process group."""

    @classmethod
    def of(cls, group: dist.ProcessGroup | DeviceMesh | None) -> "Communicator | None":
        """The transfers of the group, or of a mesh of one dimension. None: the group is this process alone."""
        if not dist.is_initialized():
            return None
        if isinstance(group, DeviceMesh):
            group = group.get_group()
        if dist.get_rank(group) < 0:
            raise ValueError("this rank does not belong to the group that contrastive_loss was given")
        return cls(group) if dist.get_world_size(group) > 1 else None

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group: dist.ProcessGroup = dist.distributed_c10d._get_default_group() if group is None else group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def post(self, tensors: list[Tensor], hop: tuple[int, int], tag: int = 0) -> Transfer:
        """Start to send the tensors to the first rank of `hop` and receive such from the other. `tag` separates two
        streams."""
        dest, src = (dist.get_global_rank(self.group, peer) for peer in hop)
        received = [torch.empty_like(x) for x in tensors]
        sends = [dist.P2POp(dist.isend, x, dest, self.group, tag) for x in tensors]
        receives = [dist.P2POp(dist.irecv, x, src, self.group, tag) for x in received]
        return Transfer(dist.batch_isend_irecv(sends + receives), tensors, received)

    def gather(self, x: Tensor) -> Tensor:
        """(n, ...) of each rank to (P n, ...) in rank order."""
        gathered = x.new_empty(self.size * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=self.group)
        return gathered

    def scatter(self, x: Tensor) -> Tensor:
        """(P n, ...) of each rank, summed over the ranks, to this rank's (n, ...)."""
        mine = x.new_empty(len(x) // self.size, *x.shape[1:])
        dist.reduce_scatter_tensor(mine, x, group=self.group)
        return mine

    def scatter_lse(self, x: Tensor) -> Tensor:
        """Log-sum-exps (P n, K) of each rank, joined over ranks, to this rank's (n, K): the maximum, then the sums."""
        largest = self.reduce(x.clone(), dist.ReduceOp.MAX).clamp_min(torch.finfo(x.dtype).min)
        mine = self.scatter((x - largest).exp_())
        return mine.log_().add_(largest[self.rank * len(mine) :][: len(mine)])

    def reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """x reduced over the ranks, in place."""
        dist.all_reduce(x, op, group=self.group)
        return x

    def agree(self, names: Sequence[str], facts: Sequence[int] | None, device: torch.device) -> None:
        """Raise ValueError if another rank has a problem, or if the ranks differ in one of the named facts. Otherwise
        the others would wait for a rank that raises, or that brings another batch size. None: of a rank that raises."""
        mine = torch.tensor([facts is None, *(facts or [0] * len(names))], dtype=torch.int64, device=device)
        failed, *gathered = self.gather(mine).view(self.size, -1).T.tolist()
        if facts is None:
            return
        faulty = [str(rank) for rank, has_failed in enumerate(failed) if has_failed]
        if faulty:
            raise ValueError(
                f"contrastive_loss was refused on rank {', '.join(faulty)} of the group; the error there has the reason"
            )
        for name, values in zip(names, gathered):
            if len(set(values)) > 1:
                raise ValueError(
                    f"contrastive_loss needs the same {name} on all ranks, but rank by rank it is {values}"
                )


@cache
def grid(group: dist.ProcessGroup, nodes: int) -> tuple[Communicator, Communicator]:
    """Of a group whose ranks are numbered node by node: the ranks of this one's place in all nodes, and of its node."""
    ranks = dist.get_process_group_ranks(group)
    here = len(ranks) // nodes
    node_by_node = [ranks[start : start + here] for start in range(0, len(ranks), here)]
    place_by_place = [ranks[place::here] for place in range(here)]
    groups = []
    for split in (place_by_place, node_by_node):
        mine, _ = dist.new_subgroups_by_enumeration(split)
        assert isinstance(mine, dist.ProcessGroup)
        groups.append(Communicator(mine))
    return groups[0], groups[1]


@dataclass(frozen=True)
class Sums:
    """What a sweep collects for each column."""

    field: str  # of RowBlock
    empty: Callable[[RowBlock], Tensor]
    join: Callable[..., Tensor]  # of two parts, with `out=`
    scatter: Callable[[Communicator, Tensor], Tensor]  # joins the parts of all ranks


def log_sum_exps(count: int) -> Sums:
    """So many for each column."""
    return Sums("lse", partial(RowBlock.empty_lse, count=count), torch.logaddexp, Communicator.scatter_lse)


GRAD = Sums("grad", RowBlock.empty_grad, torch.add, Communicator.scatter)


def collected(cols: RowBlock, sums: Sequence[Sums], visit: Visit, positive: int | None) -> list[Tensor]:
    """Visit one block of columns. Returns what the visit has summed for them."""
    parts = [s.empty(cols) for s in sums]
    cols = replace(cols, **{s.field: part for s, part in zip(sums, parts)})
    with record_function(BLOCK):
        visit(cols, positive)
    return parts


class Single:
    """One process: its rows against its columns. The base of the other exchanges."""

    size = 1
    # Of the gradient that a rank computes for a replicated tensor, the part that is its local gradient.
    local_fraction = 1.0

    def sweep(self, cols: RowBlock, sums: Sequence[Sums], visit: Visit) -> list[Tensor]:
        """Visit all columns, given this rank's. Returns each of the sums of this rank's columns."""
        return collected(cols, sums, visit, 0)

    def spread(self, rows: RowBlock, cols: RowBlock) -> tuple[RowBlock, RowBlock]:
        """The rows and columns that this rank computes with, given its own."""
        return rows, cols

    def local_rows(self, x: Tensor) -> Tensor:
        """This rank's part of a tensor over the spread rows."""
        return x

    def local_cols(self, x: Tensor) -> Tensor:
        """This rank's part of a tensor over the spread columns."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks."""
        return x


class Grouped(Single):
    """What the exchanges of several ranks share."""

    def __init__(self, communicator: Communicator) -> None:
        self.comm = communicator
        self.size, self.rank = communicator.size, communicator.rank

    def total(self, x: Tensor) -> Tensor:
        return self.comm.reduce(x.clone())

    def gathered(self, block: RowBlock) -> RowBlock:
        """The blocks of all ranks, in rank order."""
        whole = block.received([self.comm.gather(x) for x in block.sent()])
        whole.weight = None if block.weight is None else block.weight.repeat(self.size)
        return whole


class Replicated(Grouped):
    """CLIP's exchange: every rank gathers both sides, computes the whole loss, and takes its rows' gradient."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator)
        self.local_fraction = 1 / self.size

    def spread(self, rows: RowBlock, cols: RowBlock) -> tuple[RowBlock, RowBlock]:
        self._n, self._m = n, m = len(rows), len(cols)
        rows, cols = self.gathered(rows), self.gathered(cols)
        if m > n:  # the positives of all ranks first, then the hard negatives of all ranks
            is_extra = torch.arange(self.size * m, device=cols.features.device) % m >= n
            cols = cols[is_extra.sort(stable=True).indices]
        return rows, cols

    def local_rows(self, x: Tensor) -> Tensor:
        return x[self.rank * self._n :][: self._n]

    def local_cols(self, x: Tensor) -> Tensor:
        positives, extra = self.local_rows(x), self._m - self._n
        return torch.cat([positives, x[self.size * self._n + self.rank * extra :][:extra]]) if extra else positives


class Gather(Grouped):
    """A rank's rows against all columns: all-gather, reduce-scatter of their sums (DisCo-CLIP, arXiv 2304.08480)."""

    def sweep(self, cols: RowBlock, sums: Sequence[Sums], visit: Visit) -> list[Tensor]:
        positive = self.rank * len(cols)
        parts = collected(self.gathered(cols), sums, visit, positive)
        return [s.scatter(self.comm, part) for s, part in zip(sums, parts)]


class Ring(Grouped):
    """Rows stay. Columns travel from rank to rank, and their sums follow one hop behind."""

    def __init__(self, communicator: Communicator, nodes: int = 1) -> None:
        """Of several `nodes`, columns travel to a rank's like in the others, and are gathered in each."""
        super().__init__(communicator)
        self.ring = communicator
        self.inner = Single()
        if nodes > 1:
            self.ring, node = grid(communicator.group, nodes)
            self.inner = Gather(node) if node.size > 1 else self.inner

    def sweep(self, cols: RowBlock, sums: Sequence[Sums], visit: Visit) -> list[Tensor]:
        behind: Transfer | None = None
        ring = self.ring
        hop = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size

        def visit_others(cols: RowBlock, _: int | None) -> None:
            visit(cols, None)

        for number in range(ring.size):  # after which the sums are back
            ahead = ring.post(cols.sent(), hop) if number < ring.size - 1 else None
            parts = self.inner.sweep(cols, sums, visit_others if number else visit)
            if parts:
                for s, part, before in zip(sums, parts, behind.wait() if behind else []):
                    s.join(part, before, out=part)
                behind = ring.post(parts, hop, tag=1)
            if ahead is not None:
                cols = cols.received(ahead.wait())
        return behind.wait() if behind else []
