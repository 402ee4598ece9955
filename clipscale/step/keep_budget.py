"""The memory for kept graphs that the first step leaves free."""

import torch

from clipscale.common import ranks
from clipscale.common.keep import Keep
from clipscale.common.phases import StepTimer
from clipscale.data.loader.memory import free_memory
from clipscale.distributed.world import World
from clipscale.step.kept_graphs import free_gpu_memory

# Share of the free memory that a step may use. The rest is for fragmentation and, on a host, for other programs.
MARGIN = {"cuda": 0.9, "cpu": 0.5}
# Bytes of a host that always stay free.
HOST_LEFT = 4 << 30


def measured_budget(world: World, phases: StepTimer, graph_bytes: int) -> Keep:
    """What is kept with `cache.keep=auto` after the first step: the least of all ranks. A collective.

    The first step keeps no graph. It measures a chunk's graph (`graph_bytes`; see `GradCache.graph_bytes`) and its own
    working memory (`StepTimer.working_bytes`). Later steps keep graphs in the free memory, less the working memory and
    a margin. The working memory is without the graph of a replayed chunk: that is built when its tower's kept graphs
    are freed.
    """
    rest = usable_bytes(world.device) - phases.working_bytes(graph_bytes)
    return Keep.at_most(-world.all_reduce_max(-max(0, rest))[0])


def usable_bytes(device: torch.device) -> int:
    """Free memory that a step may use: of the GPU, or this process's share of the host's."""
    if device.type == "cpu":
        free = free_memory()
        return min(int(MARGIN["cpu"] * free), free - HOST_LEFT) // ranks.local_world_size()
    return int(MARGIN["cuda"] * free_gpu_memory())
