"""The memory for kept graphs: as set, or what the first step leaves free."""

import torch

from clipscale.common import ranks
from clipscale.common.phases import StepTimer
from clipscale.common.units import parse_memory
from clipscale.data.loader.memory import free_memory
from clipscale.distributed.world import World
from clipscale.step.kept_graphs import free_gpu_memory

MARGIN = {"cuda": 0.9, "cpu": 0.5}
"""Share of the free memory that a step may use. The rest is for fragmentation and, on a host, for other programs."""
HOST_LEFT = 4 << 30
"""Bytes of a host that always stay free."""


class KeepBudget:
    """The bytes for kept graphs in each step: `cache.keep` is `none`, a number of bytes, or `auto`.

    `auto` keeps none in the first step, which measures a chunk's graph and the step's working memory
    (`StepTimer.working_bytes`). Later steps keep graphs in the free memory, less the working memory and a margin. A
    replayed chunk's graph is not part of the working memory: its tower's kept graphs are freed before it is built.
    """

    def __init__(self, setting: str, world: World) -> None:
        self._world = world
        self.bytes = parse_memory("cache.keep", setting)
        """For the next step; None: not measured yet."""

    def after_step(self, phases: StepTimer, graph_bytes: int) -> None:
        """Set the budget of `auto` from what a step has used. `graph_bytes`: bytes of a chunk's graph; see
        `GradCache.graph_bytes`. A collective."""
        rest = usable_bytes(self._world.device) - phases.working_bytes(graph_bytes)
        self.bytes = -self._world.all_reduce_max(-max(0, rest))[0]  # the least of all ranks


def usable_bytes(device: torch.device) -> int:
    """Free memory that a step may use: of the GPU, or this process's share of the host's."""
    if device.type == "cpu":
        free = free_memory()
        return min(int(MARGIN["cpu"] * free), free - HOST_LEFT) // ranks.local_world_size()
    return int(MARGIN["cuda"] * free_gpu_memory())
