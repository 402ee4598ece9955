"""The moving average of the weights: its formula, its place in checkpoints, and its use by evaluation and export."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.config.sections import EvalConfig, PrecisionConfig
from clipscale.config.tools import ExportSettings
from clipscale.distributed.world import World
from clipscale.export.verb import main as export
from clipscale.models.trained import load_model
from clipscale.step.ema import WeightAverage
from clipscale.train import Run, train
from tests.support.runs import small


def test_the_average_follows_its_formula_and_lends_its_values() -> None:
    model = nn.Linear(3, 2)
    average = WeightAverage(0.5, model)
    wanted = model.weight.detach().clone()
    for n in range(1, 12):
        with torch.no_grad():
            model.weight.normal_()
        average.update()
        decay = min(0.5, (1 + n) / (10 + n))
        wanted = decay * wanted + (1 - decay) * model.weight.detach()
    torch.testing.assert_close(average.values["weight"], wanted)
    trained = model.weight.detach().clone()
    with average.in_place():
        assert torch.equal(model.weight, average.values["weight"])
    assert torch.equal(model.weight, trained)


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


def test_a_run_evaluates_the_average_and_trains_on_with_its_weights(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(
        small(shards, tmp_path / "run", ema=0.9, eval=EvalConfig(weights="ema")), World(0, 1, torch.device("cpu"))
    )
    run.train_step()
    model, average = run.state.model, run.state.average
    before = copy.deepcopy(model.state_dict())
    seen: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(
        "clipscale.train.evaluate", lambda *_, **__: seen.update(copy.deepcopy(model.state_dict())) or {}
    )
    run.evaluate()
    assert average and all(torch.equal(seen[name], value) for name, value in average.values.items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert any(not torch.equal(seen[name], before[name]) for name in before)
    run.stream.close()
