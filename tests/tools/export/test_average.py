"""Averages of weights: exact at their ends, and refused where models differ."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from clipscale.common.errors import UserError
from clipscale.config.model import ModelConfig
from clipscale.models.towers import build_model
from clipscale.models.weights.load_weights import completed_by_weights
from clipscale.tools.export.open_clip import weights
from clipscale.tools.export.settings import ExportSettings
from clipscale.tools.export.verb import main
from tests.support.checkpoints import save, save_model
from tests.support.towers import RESNET, architecture

ARCHITECTURE = architecture(32, 8, 12, layers=1) | {"vision_cfg": RESNET}


def saved(run: Path, seed: int, words: dict[str, Any] = ARCHITECTURE, **settings: Any) -> Path:
    torch.manual_seed(seed)
    config = ModelConfig("own", words, **settings)
    model = build_model(config)
    for buffer in model.buffers():
        buffer.add_(seed)  # statistics, and their counts
    save_model(run, model, config, seed)
    return run


def exported(run: Path, **settings: Any) -> dict[str, Tensor]:
    return load_file(main(ExportSettings(run=str(run), **settings)) / "open_clip_model.safetensors")


def test_an_average_is_bit_equal_to_its_ends_and_linear_between_them(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", 2)
    tuned = saved(saved(tmp_path / "tuned", 1), 3)
    one = exported(tuned, checkpoint="1")
    two = exported(base)
    three = exported(tuned)
    start = str(base / "export/open_clip_model.safetensors")
    for other, shares, expected in ((start, [1.0, 0.0], three), (f"run:{base}", [0.0, 1.0], two)):
        average = exported(tuned, average=[other], shares=shares)
        assert average.keys() == expected.keys() and all(torch.equal(average[n], expected[n]) for n in expected)
    average = exported(tuned, average=[start, f"run:{tuned}/checkpoints/step_00000001"], shares=[0.5, 0.75, -0.25])
    for name, value in average.items():
        mean = 0.5 * three[name] + 0.75 * two[name] - 0.25 * one[name]
        assert torch.allclose(value, mean if value.is_floating_point() else two[name]), name
    exported(tuned, average=[start])
    loaded = build_model(completed_by_weights(ModelConfig(name="", weights=str(tuned / "export-average"))))
    means = [(weights["visual.bn1.running_mean"]) / 2 for weights in (two, three)]
    assert torch.equal(loaded.image.encoder.bn1.running_mean, sum(means)), "equal shares"
    assert "0.5 tuned + 0.5 open_clip_model.safetensors (trained)" in (tuned / "export-average/README.md").read_text()


def test_the_average_of_another_run_is_taken_where_it_is_chosen(tmp_path: Path) -> None:
    config = ModelConfig("own", ARCHITECTURE)
    trained, average = build_model(config), build_model(config)
    ema = {"weights": dict(average.state_dict()), "updates": 3}
    values = {"model": trained.state_dict(), "ema": ema, "model_config": {"name": "own", "architecture": ARCHITECTURE}}
    save(tmp_path / "other", 3, values, keep=0)
    run = saved(tmp_path / "run", 1)
    expected = exported(tmp_path / "other", weights="ema")
    result = exported(run, average=[f"run:{tmp_path}/other::ema"], shares=[0.0, 1.0])
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    with pytest.raises(UserError, match=r"average=.*other::typo.*: the run has no 'typo'; leave ::typo out"):
        exported(run, average=[f"run:{tmp_path}/other::typo"])


def test_a_start_of_another_resolution_and_context_is_resized_as_the_run_was(tmp_path: Path) -> None:
    """The run has also a logit bias, which its start lacks."""
    words = architecture(32, 8, 12, layers=1)
    folder = main(ExportSettings(run=str(saved(tmp_path / "start", 1, words))))
    sizes: dict[str, Any] = {"image_size": 48, "context_length": 16}
    for start, bias in ((str(folder), {"init_bias": -10.0}), (f"run:{tmp_path}/start", {})):
        run = saved(tmp_path / f"run{len(bias)}", 2, words, **sizes, **bias)
        result = exported(run, average=[start], shares=[0.0, 1.0])
        begun = build_model(ModelConfig("own", words, weights=start, **sizes, **bias))
        expected = weights(begun)
        assert result.keys() == expected.keys()
        assert all(torch.equal(result[name], expected[name]) for name in expected), start


def test_models_that_cannot_be_averaged_are_refused(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", 1)
    exported(saved(tmp_path / "wide", 1, ARCHITECTURE | {"embed_dim": 8}))
    saved(tmp_path / "grey", 1, preprocess={"mean": [0.5] * 3})
    for other, shares, message in (
        ("wide", [], "average=.*wide: another architecture than the run's own"),
        ("wide/export", [], "average=.*export: another architecture than the run's own, whose embed_dim is 8, not 16"),
        ("grey", [], r"average=.*grey: trained with another model\.preprocess"),
        ("run", [0.5], r"shares=\[0.5\]: give 2 that add up to 1"),
        ("run", [0.5, 0.4], "give 2 that add up to 1"),
        ("none", [], "average=.*none.*: there is no run"),
    ):
        prefix = "" if "/" in other else "run:"
        with pytest.raises(UserError, match=message):
            exported(run, average=[f"{prefix}{tmp_path}/{other}"], shares=shares)
