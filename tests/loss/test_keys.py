"""Pairs that share a key are left out. Several ranks: test_exchange.py."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clipscale import contrastive_loss
from clipscale.loss.objective import OBJECTIVES
from clipscale.loss.similarity import DotProduct
from clipscale.loss.softmax.tile import SoftmaxTileOps
from clipscale.loss.torch_backend import TorchBackend
from tests.loss.cases import Gpu, assert_exact, features, oracle, results


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_distinct_keys_change_no_bit(objective: str) -> None:
    u, v = (x.float() for x in features(30, 30, 16))
    plain = results(contrastive_loss, u, v, 14.3, objective=objective)
    actual = results(contrastive_loss, u, v, 14.3, objective=objective, keys=torch.arange(30))
    assert all(map(torch.equal, plain, actual))


def test_a_gpu_takes_keys_in_the_tiles_of_torch() -> None:
    u, v, options = keyed(6, 4, 0)
    tiled, auto = (
        results(contrastive_loss, u.float(), v.float(), 14.3, backend=backend, runtime=Gpu(), **options)
        for backend in ("tiled", "auto")
    )
    assert all(map(torch.equal, tiled, auto))


def test_a_gpu_takes_the_kernels_where_they_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a stand-in on the CPU, which says that it was asked."""
    asked = []

    def stand_in(name: str) -> Any:
        asked.append(name)
        return lambda runtime, shape: TorchBackend(SoftmaxTileOps(), DotProduct(), runtime, is_dense=False)

    monkeypatch.setattr("clipscale.loss.api.resolve_name", stand_in)
    u, v = (x.float() for x in features(6, 6, 16))
    results(contrastive_loss, u, v, 14.3, runtime=Gpu())
    assert asked == [OBJECTIVES["softmax"].triton_backend]
    results(contrastive_loss, u, v, 14.3, runtime=Gpu(), backend="tiled")
    results(contrastive_loss, u.double(), v.double(), 14.3, runtime=Gpu())
    results(contrastive_loss, u, v, 14.3)
    assert len(asked) == 1


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
