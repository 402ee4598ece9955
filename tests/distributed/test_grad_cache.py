"""The gradient cache on several ranks gives the gradient of one graph over their whole batch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

import clipscale
from clipscale.distributed.fsdp import Sharding
from clipscale.distributed.world import World
from clipscale.step.grad_cache import GradCache
from tests.step.test_grad_cache import batch, gradients, models
from tests.support.ranks import run_ranks


def normalising(kind: type[nn.Module]) -> nn.ModuleDict:
    m = models()
    m["image"].net[1] = kind(12).double()
    return m


def _batch_norm(rank: int, world: int) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Statistics over both ranks in training; the message without synchronisation; frozen, any chunks are right."""
    peers = World(rank, world, torch.device("cpu"))
    x, y = (part[rank * 6 : (rank + 1) * 6] for part in batch(12))

    def loss(u: Tensor, v: Tensor) -> Tensor:
        return clipscale.contrastive_loss(u, v, 3.0)

    message = ""
    try:
        GradCache([normalising(nn.BatchNorm1d)["image"], models()["text"]], loss, chunks=6).step(x, y)
    except ValueError as error:
        message = str(error)
    m = normalising(nn.BatchNorm1d)
    GradCache([peers.wrap(m["image"]), peers.wrap(m["text"])], loss, chunks=[6, 4]).step(x, y)
    return gradients(m), dict(m["image"].named_buffers()), message


def test_synchronised_batch_norm_sees_the_whole_batch() -> None:
    wanted = normalising(nn.BatchNorm1d)
    u, v = (wanted[name](rows) for name, rows in zip(("image", "text"), batch(12), strict=True))
    scores = 3 * u @ v.T
    target = torch.arange(12)
    ((F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2).backward()
    buffers = dict(wanted["image"].named_buffers())
    size = torch.nn.utils.get_total_norm(gradients(wanted).values())
    for found, statistics, message in run_ranks(_batch_norm, 2):
        for name, gradient in gradients(wanted).items():  # that of the bias before the normalisation is rounding alone
            assert (found[name] - gradient).norm() <= 1e-10 * size, name
        assert statistics["net.1.num_batches_tracked"] == 1
        for name in ("net.1.running_mean", "net.1.running_var"):
            assert torch.allclose(statistics[name], buffers[name], rtol=1e-10), name
        assert "over 2 ranks it would see only a part of them; synchronise it" in message


REDUCED = {(parallel, keep): [2 + 2 * (keep > 0), 2, 2] for parallel in ("ddp", "fsdp") for keep in (0, 3000)}
"""Of a wrapper and the bytes for kept graphs, in three steps: one reduction for each tower, and one when its graphs are measured."""


def _reductions(rank: int, world: int) -> list[list[int]]:
    """How often each of three steps reduces something over ranks."""
    peers, found = World(rank, world, torch.device("cpu")), []
    for parallel, keep in REDUCED:
        m = models()
        towers = [peers.wrap(m[name], parallel, Sharding(1)) for name in ("image", "text")]
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
