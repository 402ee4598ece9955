"""Optimizers come from timm, only matrices decay, and the learning rate is a pure function of the step."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from clipscale.common.errors import UserError
from clipscale.config.sections import LogConfig, OptimConfig, ScheduleConfig
from clipscale.step.optim import DECOUPLED, Schedule, build_optimizer, largest_rms, parse_steps
from clipscale.train import train
from tests.support.runs import records, small


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


def test_named_parameters_are_not_decayed_and_factors_of_the_rate_split_the_groups() -> None:
    model = small_model()
    config = OptimConfig(weight_decay=0.3, no_decay=["2.*", "logit*"])
    optimizer = build_optimizer(model, config, scales={"0.weight": 0.5, "0.bias": 0.5})
    name_of = {id(p): name for name, p in model.named_parameters()}
    groups = [([name_of[id(p)] for p in g["params"]], g["weight_decay"]) for g in optimizer.param_groups]
    assert {name: decay for names, decay in groups for name in names} == {
        "0.weight": 0.3, "0.bias": 0, "1.weight": 0, "1.bias": 0, "2.weight": 0, "2.bias": 0, "logit_scale": 0,
    }  # fmt: skip
    schedule(ScheduleConfig(name="constant", warmup="0"), 1.0, 10).apply(optimizer, 3)
    assert {n: g["lr"] for g in optimizer.param_groups for n in (name_of[id(p)] for p in g["params"])} == {
        name: 0.5 if name.startswith("0.") else 1.0 for name in name_of.values()
    }
    with pytest.raises(UserError, match=r"optim\.no_decay=\*\.positional: no parameter has such a name"):
        build_optimizer(model, replace(config, no_decay=["2.*", "*.positional"]))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rates: Schedule, count: int) -> Iterator[int]:
    """Steps with given gradients; before each its number."""
    g = torch.Generator().manual_seed(1)
    for step in range(count):
        rates.apply(optimizer, step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=g, dtype=p.dtype)
        yield step
        optimizer.step()


def test_big_visions_decay_follows_the_schedule_and_not_the_peak() -> None:
    """big_vision: p <- p - schedule (rate u + decay p), u: Adam's update, schedule: 1 at the peak."""
    model, (rate, decay), (b1, b2), eps = small_model().double(), (3e-3, 1e-4), (0.9, 0.95), 1e-8
    config = OptimConfig(lr=rate, weight_decay=decay, betas=(b1, b2), eps=eps, decay="big_vision")
    p = model[0].weight
    wanted, m, v = p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)
    rates = schedule(ScheduleConfig(warmup="5"), rate, 40)
    for step in steps(model, build_optimizer(model, config), rates, 40):
        torch.testing.assert_close(p.detach(), wanted, rtol=0, atol=1e-15)
        with torch.no_grad():
            m, v = b1 * m + (1 - b1) * p.grad, b2 * v + (1 - b2) * p.grad**2
            update = m / (1 - b1 ** (step + 1)) / ((v / (1 - b2 ** (step + 1))).sqrt() + eps)
            wanted -= rates.lr(step) / rate * (rate * update + decay * wanted)


@pytest.mark.parametrize("name", DECOUPLED)
def test_decay_is_apart_from_the_update_and_refused_where_it_is_not(name: str) -> None:
    model = small_model()
    optimizer = build_optimizer(model, OptimConfig(name=name, lr=0.1, weight_decay=0.02, decay="big_vision", eps=None))
    before, p = model[0].weight.detach().clone(), model[0].weight
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(p.detach(), before * (1 - 0.02))
    for wrong in (OptimConfig(name="sgd"), OptimConfig(name=name, lr=0.0)):
        with pytest.raises(UserError, match=r"optim\.decay=big_vision"):
            build_optimizer(model, replace(wrong, decay="big_vision"))


def test_adafactors_update_is_clipped_at_its_root_mean_square() -> None:
    """A gradient ten times as large as the last: without momentum the update is 1 where it is clipped, not more."""
    found = {}
    for clip in (None, 1.0, 100.0):
        model = small_model()
        options = {"clipping_threshold": clip, "momentum_dtype": "float32"}
        config = OptimConfig(name="adafactorbv", lr=1.0, weight_decay=0.0, betas=(0.0, 0.98), options=options)
        optimizer = build_optimizer(model, config)
        for size in (1.0, 1.0, 10.0):
            before = model[0].weight.detach().clone()
            for p in model.parameters():
                p.grad = torch.full_like(p, size)
            optimizer.step()
        found[clip] = (model[0].weight.detach() - before).square().mean().sqrt().item()
    assert found[1.0] == pytest.approx(1.0)
    assert found[None] == found[100.0] > 1.2


@pytest.mark.parametrize("name", ["adamw", "stableadamw"])
def test_a_gradient_beyond_its_average_is_found_and_slows_stable_adamw_down(name: str) -> None:
    """Gradients of 1 for long, then of 100 for one tensor: v = 10.999, RMS = 100 / sqrt(v) = 30.15."""
    model = small_model().double()
    config = OptimConfig(name=name, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, eps=1e-8)
    optimizer = build_optimizer(model, config)
    for size in (1.0, 100.0):
        for p in model.parameters():
            p.grad = torch.full_like(p, size if p is model[2].weight else 1.0)
        before = model[2].weight.detach().clone()
        optimizer.step()
        if size == 1:
            for state in optimizer.state.values():
                state["step"].fill_(1e6)
                state["exp_avg"].fill_(1.0)
                state["exp_avg_sq"].fill_(1.0)
    found = largest_rms(optimizer, model)
    assert found is not None and found[2][int(found[1])] == "2.weight"
    assert optimizer.state[model[2].weight]["exp_avg_sq"].mean().item() == pytest.approx(10.999, abs=1e-9)
    assert found[0].item() == pytest.approx(100 / math.sqrt(10.999)) == pytest.approx(30.15, abs=5e-3)
    rate = 1e-3 / (found[0].item() if name == "stableadamw" else 1)
    moved = (before - model[2].weight.detach()).mean().item()
    assert moved == pytest.approx(rate * (0.9 + 0.1 * 100) / math.sqrt(10.999))


def test_stable_adamw_is_adamw_where_the_averages_are_up_to_date() -> None:
    weights = []
    for name in ("adamw", "stableadamw"):
        model = small_model().double()
        optimizer = build_optimizer(model, OptimConfig(name=name, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-6))
        for _ in steps(model, optimizer, schedule(ScheduleConfig(warmup="3"), 1e-3, 8), 8):
            for p in model.parameters():
                p.grad /= p.grad.abs() * (1 + 1e-9)  # of size 1: the RMS never exceeds 1
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)


def test_a_run_logs_the_largest_rms_and_its_tensor(shards: str, tmp_path: Path) -> None:
    for name, every in (("adamw", 2), ("lion", 1)):
        changes = {"optim": OptimConfig(name=name, lr=1e-3, eps=None), "log": LogConfig(report=False, every=every)}
        train(small(shards, tmp_path / name, **changes))
    first, second, *_ = records(tmp_path / "adamw")
    assert first["update_rms"] is None and first["update_rms_tensor"] is None
    assert second["update_rms"] > 0.1 and second["update_rms_tensor"].split(".")[0] in ("image", "text", "logit_scale")
    assert {record["update_rms"] for record in records(tmp_path / "lion")} == {None}


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
    return Schedule.build(config, peak, 8, 8 * total, None)


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
