"""What `benchmarks/traffic.py` and `inductor.py` count of a tower whose operations are known."""

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from clipscale.models.linear import replace_linear_layers
from clipscale.step.precision import Precision
from clipscale.tools.plan.memory_tracker import without_memory

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
N, W = 8, 16


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(W, W, bias=False), nn.GELU(), nn.GELU(), nn.Flatten(0), nn.Unflatten(0, (W, N)))


@pytest.mark.slow  # it traces several steps
def test_products_count_by_flop_and_all_else_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear layer without bias in float32: two products, since its input needs no gradient. A GELU reads and writes
    N * W numbers, and in the backward pass reads twice as many. The rows' transposition moves nothing."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    traffic = importlib.import_module("traffic")
    with FakeTensorMode(allow_non_fake_inputs=True):
        layers = tower()
        counter = traffic.counted(layers, torch.empty(N, W), "fp32")
    assert counter.flop == 2 * (2 * N * W * W)
    assert dict(counter.moved) == {"gelu": 2 * (2 + 3) * N * W * 4}
    assert all(p.grad is None for p in layers.parameters())


@pytest.mark.slow  # it loads torch's compiler
def test_compiled_operations_are_counted_as_they_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GELUs move what one does."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    inductor = importlib.import_module("inductor")
    with FakeTensorMode(allow_non_fake_inputs=True):
        fused = inductor.fused_blocks([inductor.Call(tower(), (torch.empty(N, W),), {})], "fp32")
    assert fused.bytes == {"forward": 2 * N * W * 4, "backward": 3 * N * W * 4} and fused.kernels == 2


def test_weights_that_are_cast_once_move_a_gradient_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer without bias moves so many bytes per weight in the passes of a chunk: 8 if it is cast once (a product
    reads and writes the gradient that it adds to), else 30 (two casts, 2 x 6; one of the gradient, 6; a sum, 12). Those
    are three launches of casts and one of an addition, and none if it is cast once."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    chunks = importlib.import_module("chunks")
    bf16 = Precision.set_up("bf16", torch.device("cpu"))
    with without_memory():
        layers = nn.Sequential(nn.GELU(), nn.Linear(W, W, bias=False))
        replace_linear_layers(layers)
        inputs = [torch.empty(n, W, dtype=torch.bfloat16, requires_grad=True) for n in (N, 2 * N)]
        for once, expected, casts, additions in ((False, 2 * 6 + 6 + 12, 3, 1), (True, 8, 0, 0)):
            counters = [chunks.passes(layers, x, bf16, once=once) for x in inputs]
            small, large = (sum(counter.moved.values()) for counter in counters)
            assert 2 * small - large == expected * W * W
            assert (counters[0].casts, counters[0].additions) == (casts, additions)


@pytest.mark.slow  # it loads torch's compiler
def test_launches_of_a_compiled_text_tower_are_its_products_and_fewer_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tiny` has two blocks. A block's forward pass has four products and attention, its backward pass twice as many
    products and attention's; the last block's computes the pooled token alone, by one product more."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    launches = importlib.import_module("launches")
    (row,) = launches.measure("tiny", "bf16", chunk=64, width=24)
    assert row["library_calls"] == (2 * 5 + 2 * 4 + 1) + (2 * 6 + 2 * 5 + 1)
    assert row["kernels"] + row["library_calls"] < row["eager_blocks"] < row["eager"]
    assert row["compiled"] == row["eager"] - row["eager_blocks"] + row["kernels"] + row["library_calls"]
