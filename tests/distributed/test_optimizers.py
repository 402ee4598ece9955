"""Optimizers with steps that depend on whole parameters take the same steps on FSDP2's shards."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from clipscale.common.errors import UserError
from clipscale.config.sections import SHARDABLE_OPTIMIZERS, LaunchConfig, OptimConfig, ScheduleConfig
from clipscale.step.optim import build_optimizer
from tests.support import runs
from tests.support.ranks import run_ranks
from tests.support.runs import four_step_config, records


class Model(nn.Module):
    """Rows that ranks share unevenly, fewer rows than ranks, and a scalar that is not in shards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Sequential(
            nn.Conv2d(3, 17, 3), nn.Linear(68, 33), nn.LayerNorm(33), nn.Linear(33, 3), nn.Embedding(21, 18)
        )
        self.logit_scale = nn.Parameter(torch.tensor(2.0))


def stepped(model: nn.Module, name: str, *, sharded: bool) -> list[Tensor]:
    """The parameters after three steps with given gradients, the second of which are small."""
    config = OptimConfig(name=name, lr=1e-2, weight_decay=0.1, eps=None)
    optimizer = build_optimizer(model, config, is_sharded=sharded)
    for number in range(3):
        g = torch.Generator().manual_seed(number)
        for p in model.parameters():
            gradient = torch.randn(p.shape, generator=g) * (1e-3 if number == 1 else 1)
            if isinstance(p, DTensor):
                gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = gradient
        optimizer.step()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]


def distances_on_rank(rank: int, world_size: int, names: Sequence[str]) -> dict[str, float]:
    """The largest relative difference of any parameter, by optimizer."""
    mesh = init_device_mesh("cpu", (world_size,))
    actual = {}
    for name in names:
        expected, model = stepped(Model(), name, sharded=False), Model()
        fully_shard(model.tower, mesh=mesh)
        pairs = zip(stepped(model, name, sharded=True), expected, strict=True)
        actual[name] = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    return actual


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ("adamw", "adafactorbv", "muon", "lars")),  # one that works number by number, and three of their own kinds
        pytest.param(2, SHARDABLE_OPTIMIZERS, marks=pytest.mark.slow),
        pytest.param(4, SHARDABLE_OPTIMIZERS, marks=pytest.mark.slow),
    ],
)
def test_steps_on_shards_are_those_on_whole_parameters(ranks: int, names: tuple[str, ...]) -> None:
    for actual in run_ranks(distances_on_rank, ranks, names):
        assert actual.keys() == {*names} <= {*SHARDABLE_OPTIMIZERS}
        for name, difference in actual.items():
            assert difference <= 1e-5, f"{name}: {difference:.1e}"


@pytest.mark.parametrize("name", ["adafactor", "lamb"])
def test_others_are_refused_with_those_that_work(name: str) -> None:
    with pytest.raises(UserError, match=f"optim.name={name}: needs whole parameters, .*adafactorbv, muon"):
        build_optimizer(Model(), OptimConfig(name=name), is_sharded=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactorbv", "muon"])
def test_a_run_in_shards_follows_and_resumes_the_curve_of_ddp(shards: str, tmp_path: Path, name: str) -> None:
    """It goes from two ranks in shards to two ranks, to one, and to two again."""
    optim = OptimConfig(name=name, lr=1e-3, eps=None)
    whole = four_step_config(
        shards,
        tmp_path / "whole",
        optim=optim,
        samples=60,
        schedule=ScheduleConfig(name="constant", warmup="0"),
        launch=LaunchConfig(),
    )
    run_ranks(runs.train_on_rank, 2, whole)
    parts = replace(whole, run=str(tmp_path / "parts"), launch=LaunchConfig(parallel="zero3"))
    for samples, ranks in ((24, 2), (36, 2), (48, 1), (60, 2)):
        run_ranks(runs.train_on_rank, ranks, replace(parts, samples=samples))
    actual, expected = ([r["loss"] for r in records(tmp_path / part)] for part in ("parts", "whole"))
    assert actual == pytest.approx(expected, rel=1e-3)
