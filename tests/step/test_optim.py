"""Optimizers come from timm, only matrices decay, and the learning rate is a pure function of the step."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.config.sections import CacheConfig, OptimConfig, RampConfig, ScheduleConfig
from clipscale.data.loader.ramp import BatchSizes
from clipscale.step.optim import Schedule, build_optimizer, parse_steps
from clipscale.train import train
from tests.support.runs import records, settings


def small_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 18), nn.LayerNorm(18), nn.Linear(18, 4))
    model.register_parameter("logit_scale", nn.Parameter(torch.tensor(2.0)))
    return model


def test_only_matrices_are_decayed_and_frozen_parameters_are_left_out() -> None:
    model = small_model()
    model[0].weight.requires_grad_(False)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {id(p): 0.3 if p.ndim >= 2 else 0.0 for p in model.parameters() if p.requires_grad}


def test_betas_reach_adafactor_as_momentum_and_cap() -> None:
    group = build_optimizer(small_model(), OptimConfig(name="adafactorbv", betas=(0.9, 0.95))).param_groups[0]
    assert (group["momentum"], group["beta2_cap"]) == (0.9, 0.95)


class Types(TorchDispatchMode):
    """Collects the types of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {out.dtype} if isinstance(out, torch.Tensor) else set()
        return out


def test_muon_iterates_in_float32_on_a_cpu() -> None:
    model = small_model()
    optimizer = build_optimizer(model, OptimConfig(name="muon", lr=0.1))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with Types() as types:
        optimizer.step()
    assert types.seen == {torch.float32}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimConfig(name="adamv"), "optim.name='adamv'.*did you mean .*adam"),
        (OptimConfig(options={"colour": 1}), "optim: adamw refuses its settings .*optim.betas, eps, lr and options"),
    ],
)
def test_unknown_optimizers_and_options_are_refused(config: OptimConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_optimizer(small_model(), config)


def test_steps_are_read_in_three_forms() -> None:
    assert parse_steps("2000", "s", total=10_000, per_epoch=None) == 2000
    assert parse_steps("5%", "s", total=10_000, per_epoch=None) == 500
    assert parse_steps("0.5ep", "s", total=10_000, per_epoch=300.0) == 150
    with pytest.raises(UserError, match="not known"):
        parse_steps("0.5ep", "schedule.warmup", total=10, per_epoch=None)
    with pytest.raises(UserError, match=r"schedule\.warmup='soon'"):
        parse_steps("soon", "schedule.warmup", total=10, per_epoch=None)


def schedule(config: ScheduleConfig, peak: float, total: int) -> Schedule:
    """Of so many batches of eight."""
    return Schedule.build(config, OptimConfig(lr=peak), BatchSizes(8), 8 * total, None)


def test_cosine_warms_up_linearly_peaks_and_ends_at_its_share() -> None:
    s = schedule(ScheduleConfig(warmup="10", final=0.1), 2.0, 110)
    assert s.lr(0) == pytest.approx(0.2)
    assert s.lr(9) == s.lr(10) == pytest.approx(2.0)
    assert s.lr(60) == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert s.lr(110) == pytest.approx(0.2)
    assert all(s.lr(i) >= s.lr(i + 1) for i in range(10, 109))


def test_constant_stays_and_cools_down_linearly() -> None:
    s = schedule(ScheduleConfig(name="constant", warmup="0", cooldown="20%"), 1.0, 100)
    assert [s.lr(i) for i in (0, 50, 80)] == [1.0, 1.0, 1.0]
    assert s.lr(90) == pytest.approx(0.5)


def test_schedule_sets_every_group() -> None:
    optimizer = build_optimizer(small_model(), OptimConfig(lr=1.0))
    s = schedule(ScheduleConfig(name="constant", warmup="4"), 1.0, 10)
    assert s.apply(optimizer, 1) == 0.5
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.5, 0.5]


def test_under_a_ramp_the_scaled_peak_follows_the_batch(shards: str, tmp_path: Path) -> None:
    """Batches of 6, then 24, at a constant schedule: sqrt(6/24) and sqrt(24/24) of the peak."""
    train(
        settings(
            tmp_path,
            tmp_path / "run",
            data=DataConfig(train=[shards], workers=0, shard_streams=2),
            batch=24,
            samples=60,
            ramp=RampConfig(start=6, samples=12, rule="double"),
            cache=CacheConfig(),
            schedule=ScheduleConfig(name="constant", warmup="0"),
            optim=OptimConfig(lr=1e-3, lr_scaling="sqrt"),
        )
    )
    found = records(tmp_path / "run")
    assert found[0]["batch"] == 6 and found[-1]["batch"] == 24
    for record in found:
        assert record["lr"] == pytest.approx(1e-3 * math.sqrt(record["batch"] / 24)), record["batch"]
