"""The memory for kept graphs, which the towers of a cache share."""

import logging
from dataclasses import dataclass, replace

import torch

from clipscale.batch.keep_budget import KeepBudget
from clipscale.step.cache.kept_graphs import KeptGraphs, OnShortMemory, largest_of_ranks

log = logging.getLogger(__name__)


@dataclass
class GraphBudget:
    """Divides the memory for kept graphs among towers, earlier ones first; gives it up if a graph does not fit."""

    total: KeepBudget
    # What each tower keeps of its graphs, in the cache's order.
    graphs_of_towers: list[KeptGraphs]
    # Whether a graph did not fit in an earlier step. Then no more are kept.
    is_given_up: bool = False

    def of_tower(self, i: int, reserved: float) -> KeepBudget:
        """The memory for tower i's graphs, after the first passes of all earlier towers.

        `reserved`: bytes of `total` that hold other tensors, such as the outputs of a frozen image tower.
        """
        left = self.total.minus(reserved)
        for graphs in self.graphs_of_towers[:i]:
            left = left.after_tower(graphs.num_kept, graphs.meter.bytes_each)
        return replace(left, bytes=0) if self.is_given_up else left

    def give_up_if_short(self, device: torch.device) -> None:
        """After all first passes: if a graph did not fit, drop this step's graphs and keep none from now on.

        Each rank decides alone if no tower's pass communicates. Under FSDP2, which gathers weights, and with
        synchronised batch normalisation all ranks decide together: while graphs are kept, this call is a collective.
        `device`: of the ranks' message.
        """
        is_short = any(graphs.is_out_of_memory for graphs in self.graphs_of_towers)
        keeps_graphs = self.total.bytes and not self.is_given_up
        may_repeat_alone = all(graphs.on_short_memory is OnShortMemory.RETRY for graphs in self.graphs_of_towers)
        if keeps_graphs and not may_repeat_alone:
            is_short = bool(largest_of_ranks(is_short, device))
        if is_short:
            log.warning("cache.keep: out of memory for a kept graph; this process keeps none from now on")
            self.is_given_up = True
            for graphs in self.graphs_of_towers:
                graphs.give_up()

    @property
    def graph_bytes(self) -> int:
        """Bytes of a chunk's graph of the first tower that has a second pass; 0 before it is measured."""
        return next((graphs.meter.bytes_each for graphs in self.graphs_of_towers if graphs.meter.bytes_each), 0)
