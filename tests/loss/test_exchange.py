"""Several ranks: every exchange against the oracle of the whole batch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from clipscale import contrastive_loss
from clipscale.config.sections import OBJECTIVES
from clipscale.loss.exchange import ring_hops
from tests.loss.cases import Phi, assert_exact, keys, oracle, results, token_features
from tests.loss.workers import Workers, check, stacked, stacked_again

EXCHANGES = ["replicated", "local", "gather", "ring"]
WORLDS = [(1, "tiled"), (2, "tiled"), (3, "tiled"), (3, "dense"), (4, "tiled")]
"""The number of ranks and the backend, which knows nothing of it."""
WORLDS += [pytest.param(world, "dense", marks=pytest.mark.slow) for world in (1, 2, 4)]  # type: ignore[misc]


@pytest.mark.parametrize(("world", "backend"), WORLDS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_dot_product_is_exact_on_any_number_of_ranks(ranks: Workers, world: int, exchange: str, backend: str) -> None:
    """Every size and scale, and float32, in tiles on three ranks; elsewhere the largest."""
    cases = [(1, 1, 1.0), (7, 9, 1.0), (1, 1, 100.0), (7, 9, 100.0)]
    for objective in OBJECTIVES:
        options = {"objective": objective, "exchange": exchange, "backend": backend, "tile": 4}
        every = world == 3 and backend == "tiled"
        for n, m, scale in cases if every else cases[-1:]:
            u, v = stacked(world, n, m, 12)
            check(ranks, world, u, v, scale, options)
            if every and (n, scale) == (7, 100.0):
                check(ranks, world, u.float(), v.float(), scale, options, bar=1e-5)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("kind", ["aligned", "equal", "low", "duplicates"])
def test_hard_distributions_are_exact_on_ranks(ranks: Workers, exchange: str, kind: str) -> None:
    for scale in (1.0, 100.0):
        u, v = stacked(3, 10, 12, 16, kind)
        check(ranks, 3, u, v, scale, {"exchange": exchange, "tile": 4})
    check(ranks, 3, u.float(), v.float(), 100.0, {"exchange": exchange, "tile": 4}, bar=1e-5)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_keys_and_smoothing_are_exact_on_ranks(ranks: Workers, objective: str, exchange: str) -> None:
    for world, n, m in ((2, 5, 5), (3, 4, 6)):
        u, v = stacked(world, n, m, 8)
        options = {"objective": objective, "exchange": exchange, "tile": 3}
        drawn = keys(world * n, world * m)
        images, texts = drawn["image_keys"].view(world, n), stacked_again(drawn["text_keys"], world, n)
        check(ranks, world, u, v, 14.3, options, {"image_keys": images}, {"text_keys": texts})
        if objective != "sigmoid":
            check(ranks, world, u, v, 14.3, options | {"label_smoothing": 0.1})


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_late_interaction_is_exact_on_ranks(ranks: Workers, objective: str, exchange: str) -> None:
    for world, n, m in ((2, 3, 3), (3, 2, 4)):
        x = token_features(world * n, world * m, 3, 4, 6)
        u, image_mask = x["image_features"].view(world, n, 3, 6), x["image_mask"].view(world, n, 3)
        v, text_mask = (stacked_again(x[name], world, n) for name in ("text_features", "text_mask"))
        options = {"objective": objective, "exchange": exchange, "similarity": "late", "tile": 2}
        check(ranks, world, u, v, 14.3, options, {"image_mask": image_mask}, {"text_mask": text_mask})


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_deep_similarity_is_exact_on_ranks_down_to_its_parameters(
    ranks: Workers, objective: str, exchange: str
) -> None:
    torch.manual_seed(0)
    phi = Phi(6).double()
    for world, n, m in ((2, 3, 3), (3, 2, 4)):
        u, v = stacked(world, n, m, 6)
        check(ranks, world, u, v, 9.0, {"objective": objective, "exchange": exchange, "similarity": phi, "tile": 2})


@pytest.mark.parametrize("world", [(0, 1, 2, 3), (1, 3), (2,), (0, 2, 3)])
def test_any_subgroup_will_do(ranks: Workers, world: tuple[int, ...]) -> None:
    u, v = stacked(len(world), 5, 6, 8)
    for exchange in (*EXCHANGES, "auto"):  # which is the ring
        check(ranks, world, u, v, 14.3, {"exchange": exchange})


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_the_two_level_ring_is_exact(ranks: Workers, per_node: int) -> None:
    u, v = stacked(4, 5, 6, 8)
    for objective in OBJECTIVES:
        check(ranks, 4, u, v, 14.3, {"objective": objective, "exchange": "ring", "ranks_per_node": per_node})


@pytest.mark.parametrize(
    ("size", "per_node"), [(1, 1), (2, 1), (4, 2), (6, 3), (8, 4), (8, 1), (12, 4), (16, 2), (16, 8), (9, 3)]
)
def test_ring_hops_visit_every_rank_once_and_return(size: int, per_node: int) -> None:
    hops = [ring_hops(rank, size, per_node) for rank in range(size)]
    holds = list(range(size))  # whose columns each rank holds
    seen: list[set[int]] = [{rank} for rank in range(size)]
    for step in range(size):
        for rank in range(size):
            dest, src = hops[rank][step]
            assert hops[dest][step][1] == rank, f"{rank} sends to {dest}, which expects {hops[dest][step][1]}"
            assert hops[src][step][0] == rank, f"{rank} expects from {src}, which sends to {hops[src][step][0]}"
        holds = [holds[hops[rank][step][1]] for rank in range(size)]
        for rank in range(size):
            seen[rank].add(holds[rank])
    assert holds == list(range(size)), f"the columns end at {holds}"
    assert all(len(s) == size for s in seen), f"ranks see {[len(s) for s in seen]} of {size}"


def test_the_two_level_ring_crosses_nodes_once_in_a_round_of_the_node() -> None:
    size, per_node = 16, 4
    for rank in range(size):
        crossing = [
            step
            for step, (dest, _) in enumerate(ring_hops(rank, size, per_node))
            if dest // per_node != rank // per_node
        ]
        assert crossing == [3, 7, 11, 15], f"rank {rank} leaves its node at hops {crossing}"
        rails = [ring_hops(rank, size, per_node)[step][0] % per_node for step in crossing[:-1]]
        assert set(rails) == {rank % per_node}, f"rank {rank} sends to local ranks {rails} of other nodes"


def twice(group: dist.ProcessGroup, rank: int, options: dict[str, Any]) -> bool:
    torch.manual_seed(rank)
    u, v = torch.randn(33, 16), torch.randn(35, 16)
    first, second = (results(contrastive_loss, u, v, 5.0, group=group, **options) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_same_inputs_give_the_same_bits_twice_on_ranks(ranks: Workers, exchange: str) -> None:
    assert ranks.run(twice, 4, {"exchange": exchange, "tile": 8}) == [True] * 4, "two runs differ"


def in_parts(group: dist.ProcessGroup, rank: int, exchange: str) -> list[tuple[float, float, bool]]:
    """For each side's gradient in bfloat16: the largest difference between its sums in parts and whole, its size, its storage's fit."""
    torch.manual_seed(rank)
    u, v = (torch.nn.functional.normalize(torch.randn(count, 16), dim=1).bfloat16() for count in (45, 50))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for slab in (2**14, 16):
            patch.setattr("clipscale.loss.side_gradient.SLAB", slab)
            patch.setattr("clipscale.loss.side_gradient.GRAIN", 8)
            found.append(results(contrastive_loss, u, v, 20.0, group=group, exchange=exchange, tile=8)[1:3])
    return [
        (float((a - b).abs().max()), float(a.abs().max()), b.untyped_storage().nbytes() == b.nbytes)
        for a, b in zip(*found)
    ]


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_gradients_summed_in_parts_are_those_summed_at_once_on_ranks(ranks: Workers, exchange: str) -> None:
    for answer in ranks.run(in_parts, 3, exchange):
        for difference, size, fits in answer:
            assert difference <= 2**-8 * size, f"{difference} of {size}"
            assert fits, "the gradient is a view of a larger storage"


def alone(group: dist.ProcessGroup, rank: int, u: Tensor, v: Tensor) -> list[Tensor]:
    return results(contrastive_loss, u[rank], v[rank], 7.0, group=group, exchange="none")


def test_without_an_exchange_each_rank_has_its_own_loss(ranks: Workers) -> None:
    u, v = stacked(3, 4, 5, 6)
    for rank, found in enumerate(ranks.run(alone, 3, u, v)):
        assert_exact(found, oracle(u[rank], v[rank], 7.0), 7.0, 1e-10, f"rank {rank}")


@settings(max_examples=12, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world=st.integers(1, 4),
    n=st.integers(1, 6),
    extra=st.integers(0, 3),
    width=st.integers(1, 9),
    tile=st.integers(1, 7),
    scale=st.sampled_from([0.5, 14.3, 100.0]),
    objective=st.sampled_from(OBJECTIVES),
    exchange=st.sampled_from(EXCHANGES),
    seed=st.integers(0, 999),
)
def test_splitting_rows_over_ranks_changes_nothing(
    ranks: Workers,
    world: int,
    n: int,
    extra: int,
    width: int,
    tile: int,
    scale: float,
    objective: str,
    exchange: str,
    seed: int,
) -> None:
    u, v = stacked(world, n, n + extra, width, seed=seed)
    check(ranks, world, u, v, scale, {"objective": objective, "exchange": exchange, "tile": tile})
