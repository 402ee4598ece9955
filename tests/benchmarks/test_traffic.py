"""What `benchmarks/traffic.py` counts of a tower whose operations are known."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
N, W = 8, 16


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("traffic")


def test_products_count_by_flop_and_all_else_by_bytes(traffic: Any) -> None:
    """A linear layer without bias in float32: two products, since its input needs no gradient. A GELU reads and writes
    N * W numbers, and in the backward pass reads twice as many. The rows' transposition moves nothing."""
    tower = nn.Sequential(nn.Linear(W, W, bias=False), nn.GELU(), nn.Flatten(0), nn.Unflatten(0, (W, N)))
    counter = traffic.counted(tower, torch.randn(N, W), "fp32")
    assert counter.flop == 2 * (2 * N * W * W)
    assert dict(counter.moved) == {"gelu": (2 + 3) * N * W * 4}
    assert all(p.grad is None for p in tower.parameters())
