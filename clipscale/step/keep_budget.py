"""The memory that a run gives to kept graphs: what the setting says, or what the first step leaves free."""

import torch

from clipscale.common import ranks
from clipscale.common.phases import Phases
from clipscale.common.units import parse_memory
from clipscale.data.loader.memory import free_memory
from clipscale.distributed.world import World

MARGIN = {"cuda": 0.9, "cpu": 0.5}
"""Share of the free memory that a step may use. Fragmentation costs the rest; a CPU's memory has other users."""
HOST_LEFT = 4 << 30
"""Bytes of a host that are always left to others."""


class KeepBudget:
    """The bytes for kept graphs in each step: `cache.keep` is `none`, a number of bytes, or `auto`.

    `auto` keeps none in the first step, which measures a graph and its peak beyond what it leaves. Later steps may
    keep graphs in the rest of the free memory, less a margin. That peak does not count
    one chunk's graph: when a tower's first chunk is replayed, its kept graphs have been freed and leave room for it.
    """

    def __init__(self, setting: str, world: World) -> None:
        self._world = world
        self.bytes = parse_memory("cache.keep", setting)
        """For the next step; None: not measured yet."""

    def after_step(self, phases: Phases, graph: int) -> None:
        """Take in what the step has needed. `graph`: bytes of a chunk's graph; see `GradCache.graph_bytes`. All ranks
        call it."""
        if self.bytes is None:
            rest = usable_bytes(self._world.device) - phases.working_bytes(graph)
            self.bytes = -self._world.highest(-max(0, rest))[0]  # the least of all ranks


def usable_bytes(device: torch.device) -> int:
    """Free memory that a step may use, of a host this process's share."""
    if device.type == "cpu":
        free = free_memory()
        return min(int(MARGIN["cpu"] * free), free - HOST_LEFT) // ranks.of_machine()
    free, _ = torch.cuda.mem_get_info(device)
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(MARGIN["cuda"] * (free + reserve))
