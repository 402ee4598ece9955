"""Gradients of master weights are summed while the last chunk's backward pass goes on, and a step waits for the device once."""

import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipscale.common.phases import Readback
from clipscale.config.sections import CacheConfig, LaunchConfig, PrecisionConfig
from clipscale.config.train import TrainConfig
from clipscale.distributed.sums import SummedTower, buckets
from clipscale.distributed.world import World
from clipscale.step.grad_cache import GradCache
from clipscale.step.precision import Precision
from clipscale.train import Run
from tests.distributed.measure import CPU
from tests.support.ranks import run_ranks
from tests.support.runs import BF16, small

LAYERS = 4


class Tower(nn.Module):
    """A parameter that no chunk uses is among those of the layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
        self.unused = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def step(rank: int, world: int, keep: float, chunk: int) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """What happens in the second of two steps, in its order; the summed gradients; and those that are summed afterwards."""
    events: list[str] = []
    reduce = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **named: Any) -> Any:
        events.append("sum")
        return reduce(tensor, *args, **named)

    def gradients(overlapped: bool) -> list[Tensor]:
        tower = Tower()
        masters = Precision(BF16, CPU).hold(tower)
        assert masters is not None
        trained = [masters.of.get(id(p), p) for p in tower.parameters()]
        summed = SummedTower(tower, masters.of, elements=100)
        tower.layers[0].weight.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))
        cache = GradCache(
            [summed if overlapped else tower],
            lambda u: (u.float() ** 2).sum(),
            chunks=chunk,
            keep_bytes=keep,
            autocast=partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        )
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(rank))
        for _ in range(2):
            for p in trained:
                p.grad = None
            events.clear()
            cache.step(x)
            if overlapped:
                summed.finish()
                summed.finish()
                continue
            for p in trained:
                if p.grad is not None:
                    reduce(p.grad)
        return [p.grad for p in trained if p.grad is not None]

    with patch.object(dist, "all_reduce", all_reduce):
        found = gradients(overlapped=True)
        happened = list(events)
    return happened, found, gradients(overlapped=False)


def steps(rank: int, world: int) -> list[Any]:
    return [step(rank, world, keep, chunk) for keep, chunk in ((0, 4), (1e9, 4), (1e9, 12), (0, 12))]


def test_sums_begin_in_the_last_backward_pass() -> None:
    for answers in zip(*run_ranks(steps, 2)):
        for happened, found, wanted in answers:
            assert len(found) == len(wanted) == 2 * LAYERS
            assert all(torch.equal(a, b) for a, b in zip(found, wanted))
            last = len(happened) - 1 - happened[::-1].index("first layer")
            assert happened[:last].count("sum") >= LAYERS - 2, (
                f"sums begin before the first layer's gradient: {happened}"
            )
            assert happened.count("sum") == LAYERS, "one sum for each bucket"
        assert all(torch.equal(a, b) for a, b in zip(answers[0][1], answers[1][1]))


def test_a_bucket_has_one_type_and_a_largest_size() -> None:
    sizes = [3, 4, 5, 20, 1, 1]
    parameters = [
        nn.Parameter(torch.zeros(n, dtype=torch.float64 if i == 5 else torch.float32)) for i, n in enumerate(sizes)
    ]
    assert [[p.numel() for p in group] for group in buckets(parameters, 9)] == [[3, 4], [5], [20], [1], [1]]


# ---- a whole step ----


def counted(rank: int, world: int, config: TrainConfig) -> Counter[str]:
    """Calls in the second step that make the host wait for the device, or send objects."""
    run, calls = Run(config, World(rank, world, CPU)), Counter[str]()
    run.optimizer_step()
    run.step += 1

    def counting(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def called(*args: Any, **named: Any) -> Any:
            caller = sys._getframe(1).f_code
            # Adam's counts of steps lie on the host. The loss's torch backend is that of the CPU; Triton's reads nothing.
            if not any(path in caller.co_filename for path in ("/torch/optim/", "/clipscale/loss/")):
                calls[f"{name} in {caller.co_qualname}"] += 1
            return original(*args, **named)

        return patch.object(owner, name, called)

    with (
        counting(torch.cuda, "synchronize"),
        counting(Tensor, "item"),
        counting(Tensor, "cpu"),
        counting(Tensor, "__float__"),
        counting(Tensor, "__bool__"),
        counting(dist, "broadcast_object_list"),
        counting(dist, "all_gather_object"),
        counting(Readback, "read"),
    ):
        run.optimizer_step()
    run.stream.close()
    return calls


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_step_waits_for_the_device_once(shards: str, tmp_path: Path, parallel: str) -> None:
    """For the loss and the norm, by which it is decided whether there is an update. The other reading is of the step before,
    and happens while the device works on the first chunk."""
    config = small(
        shards,
        tmp_path / "run",
        launch=LaunchConfig(parallel=parallel),
        cache=CacheConfig(image_chunk=2, text_chunk=3),
    )
    precision = PrecisionConfig() if parallel == "fsdp" else BF16
    first, other = run_ranks(counted, 2, replace(config, precision=precision))
    assert first == {"read in Run.whole_step": 1, "read in StepRecords._complete": 1}
    assert other == {"read in Run.whole_step": 1}, "only rank 0 logs"
