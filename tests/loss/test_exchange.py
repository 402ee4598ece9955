"""Several ranks: every exchange against the oracle of the whole batch, and ranks that do not fit each other."""

import gc
import math
import os
import weakref
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from clipscale import contrastive_loss, distillation_loss
from clipscale.loss import choices
from clipscale.loss.choices import auto_exchange
from clipscale.loss.objective import OBJECTIVES
from clipscale.loss.runtime import LossRuntime, running_on
from tests.loss.cases import Gpu, Phi, keys
from tests.loss.workers import Workers, check, local_results, stacked, whole
from tests.support.cases import slow_except
from tests.support.ranks import run_ranks, workers

# `auto` is one of the others. `nodes` needs several nodes, and has a test of its own.
EXCHANGES = [name for name in choices.EXCHANGES if name not in ("auto", "nodes")]
# The number of ranks and the backend, which knows nothing of it.
WORLDS = [(1, "tiled"), (3, "tiled"), (3, "dense"), (4, "tiled")]


@pytest.mark.parametrize(("world_size", "backend"), WORLDS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_dot_product_is_exact_on_any_number_of_ranks(
    ranks: Workers, world_size: int, exchange: str, backend: str
) -> None:
    """Three ranks try both sizes, float32, keys, and one-sided softmax, in tiles. Others try the larger size.

    The test below has the scale 1.
    """
    m = 7 if exchange in ("replicated", "local") else 9  # of more texts than images it is gather
    cases = [(1, 1), (7, m)]
    every = world_size == 3 and backend == "tiled"
    for objective in OBJECTIVES if every else ("softmax", "sigmoid"):
        options = {"objective": objective, "exchange": exchange, "backend": backend, "tile": 4}
        for n, m in cases if every else cases[-1:]:
            u, v = stacked(world_size, n, m, 12)
            check(ranks, world_size, u, v, 100.0, options)
            if every and n == 7:
                check(ranks, world_size, u.float(), v.float(), 100.0, options, bar=1e-5)
        if every:
            check(
                ranks,
                world_size,
                *stacked(world_size, 5, 5, 8),
                14.3,
                options,
                keys=keys(5 * world_size).view(world_size, 5),
            )


# Each kind once, and each exchange: an exchange does the same whatever the kind.
KINDS_AND_EXCHANGES = slow_except(
    [("aligned", "ring"), ("low", "gather"), ("obtuse", "ring"), ("obtuse", "local")],
    product(("aligned", "low", "obtuse"), EXCHANGES),
)


@pytest.mark.parametrize(("kind", "exchange"), KINDS_AND_EXCHANGES)
def test_hard_distributions_are_exact_on_ranks(ranks: Workers, exchange: str, kind: str) -> None:
    for scale in (1.0, 100.0):
        u, v = stacked(3, 10, 10 if exchange in ("replicated", "local") else 12, 16, kind)
        check(ranks, 3, u, v, scale, {"exchange": exchange, "tile": 4})
    check(ranks, 3, 10 * u, v, 100.0, {"exchange": exchange, "tile": 4})  # e^1000 is no float64
    check(ranks, 3, u.float(), v.float(), 100.0, {"exchange": exchange, "tile": 4}, bar=1e-5)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_modules_are_exact_on_ranks(ranks: Workers, objective: str, exchange: str) -> None:
    torch.manual_seed(0)
    phi = Phi(6).double()
    options = {"objective": objective, "exchange": exchange, "similarity": phi, "tile": 2}
    check(ranks, 3, *stacked(3, 2, 4, 6), 9.0, options)


@pytest.mark.parametrize("world", [(0, 1, 2, 3), (1, 3), (2,), (0, 2, 3)])
def test_any_subgroup_of_ranks_is_exact(ranks: Workers, world: tuple[int, ...]) -> None:
    u, v = stacked(len(world), 5, 6, 8)
    for exchange in (*EXCHANGES, "auto"):
        check(ranks, world, u, v, 14.3, {"exchange": exchange})


@pytest.mark.parametrize(
    "objective",
    [pytest.param(o, marks=pytest.mark.slow if o in ("softmax_image", "softmax_text") else ()) for o in OBJECTIVES],
)
def test_a_gather_within_nodes_and_a_ring_between_them_are_exact(ranks: Workers, objective: str) -> None:
    """There are two nodes of two ranks, four of one, or one of four. A module counts each pair once."""
    torch.manual_seed(0)
    phi = Phi(6).double()
    for here in (1, 2, 4):
        runtime = LossRuntime(ranks_of_node=here)
        options = {"objective": objective, "exchange": "nodes", "runtime": runtime}
        for scale in (1.0, 100.0) if here == 2 else (100.0,):
            check(ranks, 4, *stacked(4, 7, 9, 12), scale, options | {"tile": 4})
        check(ranks, 4, *stacked(4, 3, 4, 6), 9.0, options | {"tile": 2, "similarity": phi})


def test_auto_is_a_gather_where_that_is_small_and_else_a_ring_in_a_node() -> None:
    assert auto_exchange(1, 1, 2, on_gpu=False) == "ring"
    numbers = 2**25  # of a node's texts in half precision: 64 MiB, and 128 MiB of gradients
    assert [auto_exchange(1, numbers + more, 2, on_gpu=True) for more in (0, 1)] == ["gather", "ring"]
    numbers = 5 * 2**27  # of several nodes' texts in float32: 2.5 GiB, and as much of gradients
    assert [auto_exchange(2, numbers + more, 4, on_gpu=True) for more in (0, 1)] == ["gather", "nodes"]
    assert LossRuntime().num_nodes(8) == 1, "not started by torchrun"
    assert LossRuntime(ranks_of_node=4).num_nodes(8) == 2


def own_node(group: dist.ProcessGroup, rank: int) -> float:
    os.environ["LOCAL_WORLD_SIZE"] = "221"[rank]
    u = torch.ones(2, 3)
    return contrastive_loss(u, u, 1.0, group=group).item()


def test_ranks_on_nodes_of_different_sizes_take_one_exchange() -> None:
    with workers(3) as started:  # they change their environment
        assert started.run(own_node, 3) == pytest.approx([math.log(6)] * 3)


def test_a_small_batch_is_gathered_on_gpus(ranks: Workers) -> None:
    """The bits show it, since the order of additions is the gather's. Features may have any shape."""
    u, v = torch.randn(2, 3, 5, 4, 3).double()
    options = {"backend": "tiled", "similarity": Phi(12).double(), "runtime": Gpu()}
    auto, gather = (
        ranks.run(local_results, 3, u, v, 3.0, None, options | {"exchange": name}) for name in ("auto", "gather")
    )
    assert all(map(torch.equal, whole(auto), whole(gather)))


def refusal(group: dist.ProcessGroup, rank: int, kind: str) -> str:
    """A rank's message if rank 1 differs from the others."""
    u = torch.randn(4, 6)
    keys = torch.arange(4) if kind == "keys" else None
    exchange = "ring"
    if rank == 1:
        longer = torch.randn(5, 6)
        u = {"sizes": longer, "distilled": longer, "types": u.double(), "NaN": u * torch.nan}.get(kind, u)
        keys = None
        exchange = "gather" if kind == "exchange" else exchange
    with pytest.raises(ValueError) as caught:
        if kind == "distilled":
            distillation_loss(u, u, 10.0, [(u, u, 1.0)], group=group)
        else:
            contrastive_loss(u, u, 10.0, keys=keys, exchange=exchange, group=group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "others", "one"),
    [
        ("sizes", "the same number of images on all ranks, but rank by rank it is [4, 5, 4]", "rank by rank"),
        ("distilled", "distillation_loss needs the same number of images", "distillation_loss needs"),
        ("keys", "the same number of keys on all ranks, but rank by rank it is [4, 0, 4]", "[4, 0, 4]"),
        ("exchange", "the same exchange", "the same exchange"),
        ("types", "contrastive_loss needs the same feature type", "the same feature type"),
        ("NaN", "another rank's are not", "image_features has 24 non-finite"),
    ],
)
def test_ranks_that_differ_are_refused_on_all_of_them(ranks: Workers, kind: str, others: str, one: str) -> None:
    for rank, message in enumerate(ranks.run(refusal, 3, kind)):
        assert (one if rank == 1 else others) in message, f"rank {rank}: {message}"


def timeouts_of_nodes(group: dist.ProcessGroup, rank: int) -> list[timedelta | None]:
    """The timeouts of the groups that the exchange makes."""
    seen: list[timedelta | None] = []
    make = dist.new_subgroups_by_enumeration

    def seeing(ranks: list[list[int]], timeout: timedelta | None = None, **options: Any) -> Any:
        seen.append(timeout)
        return make(ranks, timeout=timeout, **options)

    u = torch.ones(2, 3)
    runtime = LossRuntime(ranks_of_node=2, timeout=timedelta(minutes=7))
    with mock.patch.object(dist, "new_subgroups_by_enumeration", seeing), running_on(runtime):
        contrastive_loss(u, u, 1.0, group=group, exchange="nodes")
    return seen


def groups_left(rank: int, world_size: int, root: Path) -> int:
    """Make and destroy all groups twice, and use them in between. Returns how many of them are still in memory."""
    seen: list[weakref.ref[Any]] = []
    make = dist.new_subgroups_by_enumeration

    def seeing(*given: Any, **options: Any) -> Any:
        made = make(*given, **options)
        seen.append(weakref.ref(made[0]))
        return made

    u = torch.ones(2, 3)
    dist.destroy_process_group()
    for number in range(2):
        dist.init_process_group("gloo", f"file://{root}/{number}", world_size=world_size, rank=rank)
        seen.append(weakref.ref(dist.group.WORLD))
        with mock.patch.object(dist, "new_subgroups_by_enumeration", seeing), running_on(LossRuntime(ranks_of_node=2)):
            contrastive_loss(u, u, 1.0, exchange="nodes")
        contrastive_loss(u, u, 1.0)  # the ranks agree on the number of nodes
        dist.destroy_process_group()
    gc.collect()
    assert len(seen) == 6
    return sum(group() is not None for group in seen)


def test_no_group_is_kept_when_it_has_been_destroyed(tmp_path: Path) -> None:
    assert run_ranks(groups_left, 4, tmp_path) == [0] * 4


def test_the_groups_of_nodes_wait_as_long_as_the_run() -> None:
    with workers(4) as started:
        assert started.run(timeouts_of_nodes, 4) == [[timedelta(minutes=7)] * 2] * 4
