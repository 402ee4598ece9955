"""Pairs that share a key: left out or positives, on one rank and on several.

Letters: P ranks, n images and m texts of one rank, D feature width.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clipscale import contrastive_loss
from clipscale.loss.machine import Machine
from clipscale.loss.objective import OBJECTIVES
from tests.loss.cases import assert_exact, features, keys, oracle, results
from tests.loss.workers import Workers, check, stacked

EXCHANGES = ["replicated", "local", "gather", "ring"]


@pytest.mark.parametrize("shared", ["mask", "positive"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_distinct_keys_change_no_bit(objective: str, shared: str) -> None:
    u, v = (x.float() for x in features(30, 30, 16))
    plain = results(contrastive_loss, u, v, 14.3, objective=objective)
    actual = results(contrastive_loss, u, v, 14.3, objective=objective, shared=shared, keys=torch.arange(30))
    assert all(map(torch.equal, plain, actual))


def test_equal_texts_as_positives_are_as_without_keys() -> None:
    """In the loss and in the gradient that reaches a text tower, which is their sum."""
    u, v = features(24, 24, 16, "aligned")
    same = torch.arange(24) % 7
    v = v[same]
    positive, without = (results(contrastive_loss, u, v, 14.3, shared="positive", keys=x) for x in (same, None))
    for actual in (positive, without):
        actual[2] = torch.zeros(7, 16).double().index_add(0, same, actual[2])
    assert_exact(positive, without, 14.3, 1e-9, "positive against none")


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_keys_are_exact_on_ranks(ranks: Workers, objective: str, exchange: str) -> None:
    for number, (world, n, shared) in enumerate(((2, 5, "mask"), (4, 4, "positive"))):
        u, v = stacked(world, n, n, 8)
        options = {"objective": objective, "exchange": exchange, "tile": 3, "shared": shared}
        check(ranks, world, u, v, 14.3, options, keys=keys(world * n, seed=number).view(world, n))


class Gpu(Machine):
    """Says that this machine's CPU is a GPU."""

    def is_gpu(self, device: torch.device) -> bool:
        return True


def test_a_gpu_takes_keys_in_the_tiles_of_torch() -> None:
    u, v, options = keyed(6, 4, 0, "mask")
    tiled, auto = (
        results(contrastive_loss, u.float(), v.float(), 14.3, backend=backend, machine=Gpu(), **options)
        for backend in ("tiled", "auto")
    )
    assert all(map(torch.equal, tiled, auto))


def keyed(n: int, kinds: int, seed: int, shared: str) -> tuple[Tensor, Tensor, dict]:
    """Features of n pairs, and the options for keys of so many kinds."""
    u, v = features(n, n, 7, "aligned", seed)
    given = torch.randint(0, kinds, (n,), generator=torch.Generator().manual_seed(seed))
    return u, v, {"keys": given, "shared": shared}


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    size=st.integers(1, 9),
    kinds=st.integers(1, 12),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1.0, 14.3, 100.0]),
    options=st.fixed_dictionaries(
        {"objective": st.sampled_from(sorted(OBJECTIVES)), "shared": st.sampled_from(["mask", "positive"])}
    ),
)
def test_any_keys_are_exact(size: int, kinds: int, seed: int, scale: float, options: dict) -> None:
    u, v, given = keyed(size, kinds, seed, options["shared"])
    options |= given
    for dtype, bar in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        u, v = u.to(dtype), v.to(dtype)
        actual = results(contrastive_loss, u, v, scale, tile=4, **options)
        assert_exact(actual, oracle(u, v, scale, **options), scale, bar, (size, kinds, options))
