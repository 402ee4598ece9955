"""Pairs that share a key: left out, on one rank and on several.

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


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_distinct_keys_change_no_bit(objective: str) -> None:
    u, v = (x.float() for x in features(30, 30, 16))
    plain = results(contrastive_loss, u, v, 14.3, objective=objective)
    actual = results(contrastive_loss, u, v, 14.3, objective=objective, keys=torch.arange(30))
    assert all(map(torch.equal, plain, actual))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_keys_are_exact_on_ranks(ranks: Workers, objective: str, exchange: str) -> None:
    for number, (world, n) in enumerate(((2, 5), (4, 4))):
        u, v = stacked(world, n, n, 8)
        options = {"objective": objective, "exchange": exchange, "tile": 3}
        check(ranks, world, u, v, 14.3, options, keys=keys(world * n, seed=number).view(world, n))


class Gpu(Machine):
    """Says that this machine's CPU is a GPU."""

    def is_gpu(self, device: torch.device) -> bool:
        return True


def test_a_gpu_takes_keys_in_the_tiles_of_torch() -> None:
    u, v, options = keyed(6, 4, 0)
    tiled, auto = (
        results(contrastive_loss, u.float(), v.float(), 14.3, backend=backend, machine=Gpu(), **options)
        for backend in ("tiled", "auto")
    )
    assert all(map(torch.equal, tiled, auto))


def keyed(n: int, kinds: int, seed: int) -> tuple[Tensor, Tensor, dict]:
    """Features of n pairs, and the options for keys of so many kinds."""
    u, v = features(n, n, 7, "aligned", seed)
    given = torch.randint(0, kinds, (n,), generator=torch.Generator().manual_seed(seed))
    return u, v, {"keys": given}


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    size=st.integers(1, 9),
    kinds=st.integers(1, 12),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1.0, 14.3, 100.0]),
    objective=st.sampled_from(sorted(OBJECTIVES)),
)
def test_any_keys_are_exact(size: int, kinds: int, seed: int, scale: float, objective: str) -> None:
    u, v, options = keyed(size, kinds, seed)
    options["objective"] = objective
    for dtype, bar in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        u, v = u.to(dtype), v.to(dtype)
        actual = results(contrastive_loss, u, v, scale, tile=4, **options)
        assert_exact(actual, oracle(u, v, scale, **options), scale, bar, (size, kinds, options))
