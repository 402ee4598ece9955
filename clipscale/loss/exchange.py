"""How ranks share columns: an exchange computes this rank's rows against the columns of all ranks, block by block.

A block's rows are reduced to one result for each column. The exchange joins a column's results over the rows of all
ranks, and returns them to the rank that owns the column.

The forward pass reduces log-sum-exps, by logaddexp; the backward pass reduces feature gradients, by addition. `sweep`
is the one loop of both. The transfers between ranks are in `communicator.py`.

Letters: P ranks; n rows (images) and m columns (texts) of one rank, the same on all; D feature width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch import Tensor
from torch.profiler import record_function

from clipscale.loss.block import BlockSide
from clipscale.loss.communicator import Communicator, WaitFn

BLOCK_SPAN = "contrastive_loss: block"  # a span in a profiler's trace
# Computes our rows against these columns, given their Block.positive_offset.
ComputeFn = Callable[[BlockSide, int | None], None]


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
        """`ring`: the ranks between which columns travel; None for all. `inner`: computes the blocks of the
        columns that have arrived."""
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
            pending_columns = None if is_last else ring.start_send_receive(cols.tensors_to_send(), peers)
            partials = self.inner.sweep(cols, reductions, compute if is_own else compute_without_positives)
            if pending_sums is not None:
                for reduction, partial, before in zip(reductions, partials, pending_sums()):
                    reduction.combine(partial, before, out=partial)
            if partials:
                pending_sums = ring.start_send_receive(partials, peers, tag=1)
            if pending_columns is not None:
                cols = cols.with_received(pending_columns())
        return pending_sums() if pending_sums is not None else []
