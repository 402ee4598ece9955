"""The moving average of the weights: its formula, its place in checkpoints, and its use by evaluation and export."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.config.sections import CheckpointConfig, EvalConfig, LaunchConfig, PrecisionConfig
from clipscale.config.tools import ExportSettings
from clipscale.config.train import TrainConfig, check
from clipscale.export.verb import main as export
from clipscale.models.trained import load_model
from clipscale.step.ema import WeightAverage
from clipscale.train import Run, train
from tests.state.test_start import with_peer
from tests.support.ranks import run_ranks
from tests.support.runs import on_a_rank, small


def test_the_average_follows_its_formula_and_lends_its_values() -> None:
    model = nn.Linear(3, 2)
    average = WeightAverage(0.5, dict(model.named_parameters()))
    wanted = model.weight.detach().clone()
    for n in range(1, 12):
        with torch.no_grad():
            model.weight.normal_()
        average.update()
        decay = min(0.5, (1 + n) / (10 + n))
        wanted = decay * wanted + (1 - decay) * model.weight.detach()
    torch.testing.assert_close(average.values["weight"], wanted)
    trained = model.weight.detach().clone()
    with average.in_place(model):
        assert torch.equal(model.weight, average.values["weight"])
    assert torch.equal(model.weight, trained)


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param(PrecisionConfig(), id="fp32", marks=pytest.mark.slow),
        pytest.param(PrecisionConfig("bf16", "bf16"), id="masters"),
    ],
)
def test_a_resumed_average_goes_on_bit_for_bit(shards: str, tmp_path: Path, precision: PrecisionConfig) -> None:
    train(small(shards, tmp_path / "whole", ema=0.9, precision=precision, checkpoint=CheckpointConfig(every=2, keep=0)))
    middle = str(checkpoint.path_of(tmp_path / "whole", 2))
    train(small(shards, tmp_path / "parts", ema=0.9, precision=precision, resume=middle))
    whole, parts = (checkpoint.load(checkpoint.path_of(tmp_path / run, 4)) for run in ("whole", "parts"))
    assert parts["ema"]["updates"] == 4
    assert all(torch.equal(value, parts["ema"]["weights"][name]) for name, value in whole["ema"]["weights"].items())
    assert any(not torch.equal(value, whole["model"][name]) for name, value in whole["ema"]["weights"].items())


@pytest.mark.slow  # runs and exports
def test_export_writes_the_average_by_choice(shards: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small(shards, run, ema=0.9, precision=PrecisionConfig(), samples=24))
    saved = checkpoint.load(checkpoint.path_of(run, 2))
    for weights, held in (("trained", saved["model"]), ("ema", saved["ema"]["weights"])):
        export(ExportSettings(run=str(run), out=str(tmp_path / weights), weights=weights))
        found = load_file(tmp_path / weights / "open_clip_model.safetensors")
        assert torch.equal(found["text.text_projection"], held["text.encoder.text_projection"])
    train(small(shards, tmp_path / "none", samples=12))
    with pytest.raises(UserError, match="holds no average; take weights=trained"):
        load_model(tmp_path / "none", weights="ema")


def test_shards_have_the_average_of_the_whole(shards: str, tmp_path: Path) -> None:
    fsdp = LaunchConfig(parallel="fsdp")
    settings = {"ema": 0.9, "samples": 24, "precision": PrecisionConfig()}
    run_ranks(on_a_rank, 2, small(shards, tmp_path / "two", launch=fsdp, **settings))
    train(small(shards, tmp_path / "one", **settings))
    two, one = (checkpoint.load(checkpoint.path_of(tmp_path / run, 2))["ema"]["weights"] for run in ("two", "one"))
    torch.testing.assert_close(two, one, rtol=1e-2, atol=1e-4)


def test_a_run_evaluates_the_average_and_trains_on_with_its_weights(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(small(shards, tmp_path / "run", ema=0.9, eval=EvalConfig(weights="ema")), with_peer(lambda value: value))
    run.optimizer_step()
    before = run.state.weights()
    seen: dict[str, torch.Tensor] = {}
    copy = lambda model, *_, **__: seen.update({n: v.clone() for n, v in model.state_dict().items()}) or {}  # noqa: E731
    monkeypatch.setattr("clipscale.train.evaluate", copy)
    run.evaluate()
    assert run.state.average is not None
    name = "text.encoder.text_projection"
    assert torch.equal(seen[name], run.state.average.values[name].bfloat16())
    assert all(torch.equal(value, before[key]) for key, value in run.state.weights().items())
    run.stream.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ema": 1.0}, "ema=1.0: give less than 1"),
        ({"eval": EvalConfig(weights="ema")}, "eval.weights=ema: this run keeps no average"),
    ],
)
def test_mistakes_are_named(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(TrainConfig(samples=10, **settings))
