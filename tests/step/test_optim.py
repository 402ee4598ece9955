"""Optimizers come from timm, only matrices decay, and the learning rate is a pure function of the step."""

import math
from typing import Any

import pytest
import timm.optim
import torch
from timm.optim.muon import get_lr_scale, zeropower_via_newtonschulz
from torch import Tensor, nn

from clipscale.config.sections import OptimConfig, ScheduleConfig
from clipscale.step.optim import (
    STATE_SIZES,
    Schedule,
    build_optimizer,
    least_state_bytes,
    parameter_groups,
    parse_steps,
    set_lr,
)
from tests.support.user_errors import refused


def small_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 18), nn.LayerNorm(18), nn.Linear(18, 4))
    model.register_parameter("logit_scale", nn.Parameter(torch.tensor(2.0)))
    return model


def test_only_matrices_are_decayed_and_factors_scale_the_rate() -> None:
    model = small_model()
    model[0].bias.requires_grad_(False)
    config = OptimConfig(weight_decay=0.3)
    optimizer = build_optimizer(model, config, lr_factors={"0.weight": 0.5})
    set_lr(optimizer, 1.0)
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    trained = {name: group_of[id(p)] for name, p in model.named_parameters() if id(p) in group_of}
    assert {name: (group["weight_decay"], group["lr"]) for name, group in trained.items()} == {
        "0.weight": (0.3, 0.5), "1.weight": (0, 1), "1.bias": (0, 1), "2.weight": (0.3, 1), "2.bias": (0, 1),
        "logit_scale": (0, 1),
    }  # fmt: skip
    assert {
        g["weight_decay"] for g in build_optimizer(model, OptimConfig()).param_groups if g["params"][0].ndim > 1
    } == {0.2}


@pytest.mark.parametrize("clip", [None, 1.0, 100.0])
def test_adafactors_update_is_clipped_at_its_root_mean_square(clip: float | None) -> None:
    """The gradient is ten times as large as the last one."""
    options = {"clipping_threshold": clip, "momentum_dtype": "float32"}
    config = OptimConfig(name="adafactorbv", lr=1.0, weight_decay=0.0, betas=(0.0, 0.98), options=options)
    model = small_model()
    optimizer = build_optimizer(model, config)
    p = model[0].weight
    for size in (1.0, 1.0, 10.0):
        before = p.detach().clone()
        p.grad = torch.full_like(p, size)
        optimizer.step()
    update = (p.detach() - before).square().mean().sqrt().item()
    assert update == pytest.approx(1.0) if clip == 1 else update > 1.2


class Kinds(nn.Module):
    """Matrices, and everything that Muon leaves to AdamW."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 16, 3)
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16)
        self.wide = nn.Linear(32, 96)
        self.thin = nn.Linear(96, 3)
        self.norm = nn.LayerNorm(16)
        self.words = nn.Embedding(40, 16)
        self.probe = nn.Parameter(torch.randn(1, 4, 16))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))


MATRICES = {"conv.weight", "wide.weight"}


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 4, first: int = 0) -> dict[str, Tensor]:
    """The parameters after steps with given gradients."""
    for number in range(first, first + count):
        g = torch.Generator().manual_seed(number)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"fallback_lr_scale": 0.3}, {"nesterov": True}, {"algo": "adamuon"}])
def test_muon_takes_the_steps_of_timms(options: dict[str, Any]) -> None:
    model = Kinds()
    other = Kinds()
    config = OptimConfig(name="muon", lr=1e-2, weight_decay=0.1, eps=None, options=options)
    actual = stepped(model, build_optimizer(model, config))
    groups = parameter_groups(other, config, {})
    timms = timm.optim.create_optimizer_v2(groups, opt="muon", lr=1e-2, momentum=0.9, betas=(0.9, 0.98), **options)
    for name, expected in stepped(other, timms).items():
        # timm's iteration rounds to bfloat16
        torch.testing.assert_close(actual[name], expected, rtol=0, atol=1e-2 if name in MATRICES else 1e-6, msg=name)


def test_muon_iterates_in_float32_on_a_cpu() -> None:
    model = Kinds()
    optimizer = build_optimizer(model, OptimConfig(name="muon", lr=1.0, weight_decay=0.0, eps=None))
    before = model.wide.weight.detach().clone()
    after = stepped(model, optimizer, 1)["wide.weight"]
    quintic = [(4.0848, -6.8946, 2.927), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)]
    quintic += [(2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)]
    exact = zeropower_via_newtonschulz(model.wide.weight.grad, 5, quintic, dtype=torch.float64)
    update = (before - after) / get_lr_scale(before.shape)
    assert (update - exact).abs().max().item() < 1e-5


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_adam_is_fused_unless_another_form_is_asked_for(name: str) -> None:
    def after(**options: Any) -> dict[str, Tensor]:
        model = Kinds()
        optimizer = build_optimizer(model, OptimConfig(name=name, lr=1e-2, options=options))
        assert {bool(group["fused"]) for group in optimizer.param_groups} == {not options}
        return stepped(model, optimizer)

    plain = after(fused=False)
    for options in ({}, {"foreach": True}):
        torch.testing.assert_close(after(**options), plain, rtol=0, atol=1e-7)


def test_betas_reach_adafactor_as_momentum_and_cap() -> None:
    group = build_optimizer(small_model(), OptimConfig(name="adafactorbv", betas=(0.9, 0.95))).param_groups[0]
    assert (group["momentum"], group["beta2_cap"]) == (0.9, 0.95)


def test_unknown_options_are_refused() -> None:
    with refused("optim: adamw refuses its settings .*optim.betas, eps, lr and options"):
        build_optimizer(small_model(), OptimConfig(options={"colour": 1}))


def test_steps_are_read_in_three_forms() -> None:
    assert parse_steps("s", "2000", total=10_000, per_epoch=None) == 2000
    assert parse_steps("s", "5%", total=10_000, per_epoch=None) == 500
    assert parse_steps("s", "0.5ep", total=10_000, per_epoch=300.0) == 150
    with refused("not known"):
        parse_steps("schedule.warmup", "0.5ep", total=10, per_epoch=None)


def schedule(config: ScheduleConfig, peak: float, total: int) -> Schedule:
    """The schedule of a run of `total` batches of eight."""
    return Schedule.build(config, OptimConfig(lr=peak), 8, 8 * total, None, 0)


def test_cosine_warms_up_linearly_peaks_and_ends_at_its_share() -> None:
    s = schedule(ScheduleConfig(warmup="10", final=0.1), 2.0, 110)
    assert s.lr(1) == pytest.approx(0.2)
    assert s.lr(10) == s.lr(11) == pytest.approx(2.0)
    assert s.lr(61) == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert s.lr(111) == pytest.approx(0.2)
    assert all(s.lr(i) >= s.lr(i + 1) for i in range(11, 110))


def test_epochs_are_counted_in_steps_of_the_batch() -> None:
    config = ScheduleConfig(warmup="0.5ep", cooldown="1ep")
    of_epochs = Schedule.build(config, OptimConfig(), global_batch=8, samples=4000, epoch_samples=800, steps_before=0)
    assert (of_epochs.total, of_epochs.warmup, of_epochs.cooldown) == (500, 50, 100)


def test_constant_stays_and_cools_down_linearly() -> None:
    s = schedule(ScheduleConfig(name="constant", warmup="0", cooldown="20%"), 1.0, 100)
    assert [s.lr(i) for i in (1, 51, 81)] == [1.0, 1.0, 1.0]
    assert s.lr(91) == pytest.approx(0.5)


@pytest.mark.parametrize(("cooldown", "rate"), [("0", 1.0), ("20%", 0.0)])
def test_a_run_past_its_end_has_the_rate_of_its_end(cooldown: str, rate: float) -> None:
    """A run that is given fewer samples than it has trained asks for it."""
    s = schedule(ScheduleConfig(name="constant", warmup="0", cooldown=cooldown), 1.0, 50)
    assert s.lr(51) == s.lr(100) == rate


def bytes_of_state(config: OptimConfig) -> tuple[int, int]:
    """The least bytes of a small model's state, and those that its optimizer keeps after a step."""
    model = nn.Sequential(nn.Embedding(96, 128), nn.Linear(128, 96))
    optimizer = build_optimizer(model, config)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    kept = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v))
    return least_state_bytes(model, config), kept


@pytest.mark.parametrize("name", [*STATE_SIZES])
def test_the_least_bytes_of_a_state_are_those_that_an_optimizer_keeps(name: str) -> None:
    least, kept = bytes_of_state(OptimConfig(name=name))
    assert least <= kept <= 1.05 * least


def test_a_state_without_momentum_is_not_counted() -> None:
    least, kept = bytes_of_state(OptimConfig(name="rmsprop", betas=[0.0, 0.9]))
    assert least <= kept < bytes_of_state(OptimConfig(name="rmsprop"))[0]
