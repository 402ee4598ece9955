"""The memory of a step: how much it may use, how much of that kept graphs get, and the error if it runs out."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from clipscale.common import ranks
from clipscale.common.batch import ChunkSizes
from clipscale.common.errors import UserError, one_line
from clipscale.common.memory import free_memory
from clipscale.distributed.world import World
from clipscale.step.cache.grad_cache import GradCache
from clipscale.step.cache.kept_graphs import free_gpu_memory
from clipscale.step.measurements import StepTimer

# Share of the free memory that a step may use. The rest is for fragmentation and, on a host, for other programs.
USABLE_SHARE = {"cuda": 0.9, "cpu": 0.5}
# Bytes of a host that always stay free.
HOST_RESERVE = 4 << 30


def measured_keep_bytes(world: World, timer: StepTimer, graph_bytes: int) -> int:
    """A collective: the bytes for kept graphs after the first step with `cache.keep=auto`, the least of all ranks.

    The first step keeps no graph. It measures a chunk's graph (`graph_bytes`; see `KeptGraphs`) and its own working
    memory (`StepTimer.working_bytes`). Later steps keep graphs in the free memory, less the working memory and a
    margin. The graph of a replayed chunk needs no memory of its own: the kept graphs of its tower are backpropagated
    and freed before the first replay.
    """
    bytes_left = max(0, usable_bytes(world.device) - timer.working_bytes(graph_bytes))
    [negated_least] = world.all_reduce_max(-bytes_left)  # a minimum
    return -negated_least


def usable_bytes(device: torch.device) -> int:
    """Free memory that a step may use: of the GPU, or this process's share of the host's."""
    if device.type == "cpu":
        free = free_memory()
        return min(int(USABLE_SHARE["cpu"] * free), free - HOST_RESERVE) // ranks.local_world_size()
    return int(USABLE_SHARE["cuda"] * free_gpu_memory())


@contextmanager
def out_of_memory_as_user_error(cache: GradCache, chunk_sizes: ChunkSizes, part: str, step: int) -> Iterator[None]:
    """Context of a part of a step. Raises UserError if the device runs out of memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        chunks = f"{chunk_sizes.image} images and {chunk_sizes.text} captions"
        graphs = sum(cache.num_kept_graphs)
        kept = f" with {graphs} kept graphs (cache.keep=none keeps none)" if graphs else ""
        raise UserError(
            f"step {step}: out of memory in {part}, in chunks of {chunks}{kept} ({one_line(error)}); clipscale plan "
            "with the settings of this run says what fits"
        ) from error
