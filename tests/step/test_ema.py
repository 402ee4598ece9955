"""The moving average of the weights: its formula, its place in checkpoints, and its use by evaluation and export."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from clipscale.config.sections import EvalConfig
from clipscale.step.ema import WeightEma
from tests.support.checkpoints import ONE_RANK
from tests.support.runs import four_step_config, train_loop


def test_the_average_follows_its_formula_and_lends_its_values() -> None:
    model = nn.Linear(3, 2)
    average = WeightEma(0.5, model)
    expected = model.weight.detach().clone()
    for n in range(1, 12):
        with torch.no_grad():
            model.weight.normal_()
        average.update()
        decay = min(0.5, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    torch.testing.assert_close(average.averages["weight"], expected)
    trained = model.weight.detach().clone()
    with average.swapped_in():
        assert torch.equal(model.weight, average.averages["weight"])
    assert torch.equal(model.weight, trained)


def test_without_a_saved_average_it_starts_again_at_the_weights() -> None:
    """It begins as a new average does: its first steps weigh as much."""
    model = nn.Linear(3, 2)
    average = WeightEma(0.9, model)
    average.update()
    with torch.no_grad():
        model.weight.normal_()
    average.load(None)
    anew = WeightEma(0.9, model)
    with torch.no_grad():
        model.weight.normal_()
    average.update()
    anew.update()
    assert torch.equal(average.averages["weight"], anew.averages["weight"])


@pytest.mark.parametrize(("scale", "averaged"), [(2.0**100, 0), (2.0**10, 1)])
def test_a_step_that_the_scaler_skips_is_not_averaged(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float, averaged: int
) -> None:
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=scale))
    config = four_step_config(shards, tmp_path / "run", ema=0.9, precision="fp16")
    run = train_loop(config, ONE_RANK)
    run.run_step()
    run.stream.close()
    average = run.train_step.ema
    assert average and average.num_updates == averaged


def test_a_run_evaluates_the_average_and_trains_on_with_its_weights(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_loop(four_step_config(shards, tmp_path / "run", ema=0.9, eval=EvalConfig(weights="ema")), ONE_RANK)
    run.run_step()
    model, average = run.train_step.model, run.train_step.ema
    before = copy.deepcopy(model.state_dict())
    seen = {}
    monkeypatch.setattr(
        "clipscale.run.train_loop.evaluate", lambda *_, **__: seen.update(copy.deepcopy(model.state_dict())) or {}
    )
    run.evaluate()
    assert average and all(torch.equal(seen[name], value) for name, value in average.averages.items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert any(not torch.equal(seen[name], before[name]) for name in before)
    run.stream.close()
