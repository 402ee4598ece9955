"""The gradient cache on several ranks gives the gradient of one graph over their whole batch."""

import torch
from torch.distributed.tensor.debug import CommDebugMode

from clipscale.distributed.world import World
from clipscale.step.grad_cache import GradCache
from tests.step.test_grad_cache import batch, models
from tests.support.ranks import run_ranks

REDUCED = {(parallel, keep): [2 + 2 * (keep > 0), 2, 2] for parallel in ("ddp", "fsdp") for keep in (0, 3000)}
"""Of a wrapper and the bytes for kept graphs, in three steps: one reduction for each tower, and one when its graphs are
measured.
"""


def _reductions(rank: int, world: int) -> list[list[int]]:
    """How often each of three steps reduces something over ranks."""
    peers, found = World(rank, world, torch.device("cpu")), []
    for parallel, keep in REDUCED:
        m = models()
        towers = [peers.wrap(m[name], parallel, 1) for name in ("image", "text")]
        cache = GradCache(towers, m["head"], chunks=[2, 5], keep_bytes=keep)
        steps = []
        for _ in range(3):
            with CommDebugMode() as communication:
                cache.step(*batch(6))
            steps.append(sum(n for op, n in communication.get_comm_counts().items() if "reduce" in str(op)))
        found.append(steps)
    return found


def test_gradients_are_reduced_once_for_each_tower_whatever_the_number_of_chunks() -> None:
    for found in run_ranks(_reductions, 2):
        assert found == [*REDUCED.values()]
