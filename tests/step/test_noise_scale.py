"""The gradient noise scale, on problems whose noise is known."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipscale.config.data import DataConfig
from clipscale.config.sections import CacheConfig, LogConfig
from clipscale.distributed.world import World
from clipscale.step.grad_cache import GradCache
from clipscale.step.noise_scale import NoiseScale
from clipscale.train import train
from tests.support.runs import records, settings

ALONE = World(0, 1, torch.device("cpu"))
WIDTH, MEAN, SPREAD = 200, 0.5, 2.0
TRACE, SIGNAL = WIDTH * SPREAD**2, WIDTH * MEAN**2  # of the samples' gradients, which here are the samples


class Product(nn.Module):
    """f(x) = <w, x>: with the mean of f as the loss, a sample's gradient is the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w)[:, None]


def estimate(towers: list[nn.Module], inputs: list[Tensor], chunks: list[int], scale: float = 1.0) -> dict[str, Any]:
    cache = GradCache(towers, lambda *f: scale * sum(x.mean() for x in f), chunks=chunks)
    noise = NoiseScale(towers)
    value = cache.loss(*cache.encode(*inputs))
    cache.backward(value)
    with noise.measure(cache):
        cache.replay()
    for tower in towers:  # the scaler's factor leaves the finished gradients
        tower.w.grad /= scale
    estimate = noise.estimate(ALONE, len(inputs[0]), scale)
    for tower in towers:
        tower.zero_grad()
    return estimate


@pytest.mark.parametrize("chunks", [[7, 24], *(pytest.param(x, marks=pytest.mark.slow) for x in ([8, 8], [32, 4]))])
def test_the_estimate_is_unbiased_for_any_chunks(chunks: list[int]) -> None:
    """Two towers whose parts add up; means over 30 batches of 64."""
    towers: list[nn.Module] = [Product(), Product()]
    g = torch.Generator().manual_seed(1)
    found = []
    for _ in range(30):
        inputs = [MEAN + SPREAD * torch.randn(64, WIDTH, generator=g, dtype=torch.float64) for _ in towers]
        found.append(estimate(towers, inputs, chunks))
    trace = sum(f["noise_trace"] for f in found) / len(found)
    signal = sum(f["noise_signal"] for f in found) / len(found)
    print(f"trace {trace:.2f} of {2 * TRACE}, signal {signal:.3f} of {2 * SIGNAL}, scale {trace / signal:.2f}")
    assert trace == pytest.approx(2 * TRACE, rel=0.03)
    assert signal == pytest.approx(2 * SIGNAL, rel=0.03)
    assert trace / signal == pytest.approx(SPREAD**2 / MEAN**2, rel=0.05)


def test_equal_chunks_give_the_papers_two_batch_sizes() -> None:
    """|G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b) and tr(S) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B), appendix A.1."""
    x = MEAN + SPREAD * torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    big = x.mean(0).square().sum()
    small = torch.stack([rows.mean(0).square().sum() for rows in x.split(6)]).mean()
    found = estimate([Product()], [x], [6], scale=1024.0)
    assert found["noise_signal"] == pytest.approx(((24 * big - 6 * small) / 18).item())
    assert found["noise_trace"] == pytest.approx(((small - big) / (1 / 6 - 1 / 24)).item())
    assert found["noise_scale"] == pytest.approx(found["noise_trace"] / found["noise_signal"])


def test_without_noise_the_scale_is_zero_and_one_chunk_gives_none() -> None:
    x = torch.ones(12, WIDTH, dtype=torch.float64)
    assert estimate([Product()], [x], [4])["noise_scale"] == pytest.approx(0, abs=1e-9)
    assert estimate([Product()], [x], [12]) == {"noise_scale": None, "noise_trace": None, "noise_signal": None}


def test_a_run_logs_it_every_so_many_steps_and_learns_the_same(shards: str, tmp_path: Path) -> None:
    data = DataConfig(train=[shards], workers=0)
    found = []
    for name, every in (("with", 2), ("without", 0)):
        log = LogConfig(report=False, noise_scale=every)
        cache = CacheConfig(image_chunk=8, text_chunk=12)
        train(settings(tmp_path, tmp_path / name, data=data, batch=24, samples=96, log=log, cache=cache))
        found.append(records(tmp_path / name))
    assert ["noise_scale" in record for record in found[0]] == [False, True, False, True]
    assert found[0][1]["noise_trace"] > 0
    losses = [[r["loss"] for r in run] for run in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5), "captions are not sorted in these steps"
