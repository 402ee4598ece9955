"""The gradient cache on several ranks gives the gradient of one graph over their whole batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import clipscale
from clipscale.distributed.fsdp import Sharding
from clipscale.distributed.world import World
from clipscale.step.grad_cache import GradCache
from tests.step.test_grad_cache import assert_same, batch, gradients, models
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


REDUCED = {("ddp", 0): 2, ("ddp", 3000): 2, ("fsdp", 0): 3, ("fsdp", 3000): 3}
"""Of a wrapper and the bytes for kept graphs: one reduction for each tower, and one with which shards agree on kept graphs."""


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
        assert found == [[n] * 3 for n in REDUCED.values()]


class Scarce:
    """An input whose first chunk runs out of memory, once."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.out = rows, False

    def __len__(self) -> int:
        return len(self.rows)

    def chunk(self, start: int, stop: int) -> Tensor:
        if not self.out:
            self.out = True
            raise torch.OutOfMemoryError("no more")
        return self.rows[start:stop]


def _one_rank_runs_out(rank: int, world: int) -> tuple[dict[str, Tensor], int]:
    """DDP rebuilds its buckets, with collectives, in the second step's first forward pass with gradients."""
    peers, m = World(rank, world, torch.device("cpu")), models()
    towers = [peers.wrap(m[name]) for name in ("image", "text")]
    cache = GradCache(towers, lambda u, v: clipscale.contrastive_loss(u, v, 3.0), chunks=2, keep_bytes=10**6)
    x, y = (part[rank * 6 : (rank + 1) * 6] for part in batch(12))
    cache.step(x, y)
    m.zero_grad()
    cache.step(Scarce(x) if rank else x, y)
    return gradients(m), len(cache.towers[0].graphs.kinds)


def test_memory_that_ends_on_one_rank_where_ddp_rebuilds_its_buckets() -> None:
    wanted = models()
    features = (wanted[name](rows) for name, rows in zip(("image", "text"), batch(12), strict=True))
    clipscale.contrastive_loss(*features, 3.0).backward()
    answers = run_ranks(_one_rank_runs_out, 2, timeout_s=60)
    assert [kept for _, kept in answers] == [3, 0]
    for found, _ in answers:
        assert_same(found, gradients(wanted), 1e-10)


def _in_a_subgroup(rank: int, world: int) -> tuple[dict[str, Tensor], list[list[str]]]:
    """Ranks 0 and 1, of which rank 1 has no memory for graphs; rank 2 takes no part."""
    mesh = DeviceMesh("cpu", [0, 1])
    if rank == 2:
        return {}, []
    m = models()
    parallelize_module(
        m["image"].net,
        mesh,
        {"0": ColwiseParallel(output_layouts=Replicate()), "4": RowwiseParallel(input_layouts=Replicate())},
    )
    fully_shard(m["text"], mesh=mesh)
    cache = GradCache([m["image"], m["text"]], m["head"], chunks=2, keep_bytes=0 if rank else 10**6)
    for _ in range(2):
        m.zero_grad()
        cache.step(*batch(6))
    return gradients(m), [tower.graphs.kinds for tower in cache.towers]


def test_towers_of_a_subgroup_agree_on_kept_graphs_within_it() -> None:
    wanted = models()
    wanted["head"](*(wanted[name](rows) for name, rows in zip(("image", "text"), batch(6), strict=True))).backward()
    for found, kept in run_ranks(_in_a_subgroup, 3, timeout_s=60)[:2]:
        assert_same(found, gradients(wanted), 1e-10)
        assert kept == [[], []]


def _gathered(rank: int, world: int) -> list[list[str]]:
    """FSDP2's weights are still gathered after an evaluation when the cache is made; rank 1 has no memory for graphs."""
    mesh, m = DeviceMesh("cpu", [0, 1]), models()
    for name in ("image", "text"):
        fully_shard(m[name], mesh=mesh, reshard_after_forward=False)
    with torch.no_grad():
        m["head"](*(m[name](x) for name, x in zip(("image", "text"), batch(6), strict=True)))
    cache = GradCache([m["image"], m["text"]], m["head"], chunks=2, keep_bytes=0 if rank else 10**6)
    for _ in range(2):
        cache.step(*batch(6))
    return [tower.graphs.kinds for tower in cache.towers]


def test_ranks_agree_on_kept_graphs_though_weights_are_gathered() -> None:
    assert run_ranks(_gathered, 2, timeout_s=60) == [[[], []]] * 2


def test_no_graphs_are_kept_under_fsdp1(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("clipscale.step.grad_cache.FullyShardedDataParallel", nn.Linear)
    cache = GradCache([nn.Linear(7, 5), models()["text"]], models()["head"], chunks=2, keep_bytes=10**6)
    assert cache.budget.bytes == 0 and "keep_bytes=1000000: no graphs are kept under FSDP1" in caplog.text
