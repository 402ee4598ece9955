"""Plain values in, a checked configuration out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.advice import oversized_batch_warning, setting_warnings
from clipscale.config.config_file import change_lines, to_yaml
from clipscale.config.data import DataConfig
from clipscale.config.model import ModelConfig, TowerConfig
from clipscale.config.parse import dataclass_from
from clipscale.config.sections import DistillConfig, LossConfig, OptimConfig
from clipscale.config.train_config import MAX_SAMPLES, TrainConfig, with_length


def config(**changes: Any) -> TrainConfig:
    """A valid configuration with these changes."""
    return replace(TrainConfig(samples=1000, data=DataConfig(train=["x.tar"])), **changes)


LAST = TowerConfig(train="1")


def test_a_locked_tower_of_random_weights_gives_a_warning() -> None:
    assert setting_warnings(config()) == []
    assert setting_warnings(config(model=ModelConfig(image=TowerConfig("vit.pt", train="none")))) == []
    [line] = setting_warnings(config(model=ModelConfig(image=TowerConfig(train="none"))))
    assert "model.image.weights=PATH" in line
    assert setting_warnings(config(model=ModelConfig(lora=4))) == [
        "model.lora=4 adapts random weights; give what it adapts, model.weights=..."
    ]


def test_kernels_that_the_teachers_loss_does_not_have_give_a_warning() -> None:
    kernels = LossConfig(backend="triton")
    assert setting_warnings(config(loss=kernels)) == []
    [line] = setting_warnings(config(loss=kernels, distill=DistillConfig(["big"])))
    assert line.startswith("loss.backend=triton:") and "loss.backend=auto" in line


@pytest.mark.parametrize(
    ("model", "lr", "rate"),
    [
        ({"weights": "openai"}, 5e-4, "1e-6 to 1e-5"),
        ({"weights": "openai", "image": LAST, "text": LAST}, 1e-3, "1e-4"),
        ({"weights": "openai", "lora": 4}, 1e-3, "1e-4"),
        ({"weights": "openai"}, 1e-5, ""),
        ({}, 1e-3, ""),
        ({"image": TowerConfig("vit.pt", train="none")}, 1e-3, ""),
    ],
)
def test_a_rate_of_pretraining_is_warned_of_where_a_run_begins_with_weights(
    model: dict[str, Any], lr: float, rate: str
) -> None:
    lines = setting_warnings(config(model=ModelConfig(**model), optim=OptimConfig(lr=lr)))
    assert len(lines) == bool(rate)
    assert not lines or (f"optim.lr={lr:g}" in lines[0] and rate in lines[0])


def test_the_environment_shortens_runs_and_lengthens_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_SAMPLES, "1k")
    assert with_length(config(samples=4096)).samples == 1024
    assert with_length(config(samples=None, epochs=3.0)).samples == 1024
    assert with_length(config(samples=9999, batch=2048)).samples == 2048, "at least a batch"
    monkeypatch.setenv(MAX_SAMPLES, "some")
    with pytest.raises(UserError, match=f"{MAX_SAMPLES}: 'some' is not a count"):
        with_length(config())


def test_the_written_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    """The run's folder has a name that is not UTF-8."""
    original = with_length(config(run="m\udcff", optim=OptimConfig(options={"foreach": True})))
    files.write_text(tmp_path / "config.yaml", to_yaml(original))
    back = dataclass_from(TrainConfig, files.read_record(tmp_path / "config.yaml"))
    assert back == original


def test_changes_of_a_resumed_run_are_listed_by_key(tmp_path: Path) -> None:
    before = TrainConfig(batch=64, samples=640, run="a")
    after = replace(
        before, samples=1280, run="b", resume="x.pt", optim=OptimConfig(lr=0.1), data=DataConfig(train=["b"])
    )
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(before))
    assert change_lines(files.read_record(file), to_yaml(before)) == []
    changed = ["samples 640 -> 1280", "data.train None -> ['b']", f"optim.lr {before.optim.lr} -> 0.1"]
    assert change_lines(files.read_record(file), to_yaml(after)) == changed


@pytest.mark.parametrize(
    ("batch", "samples", "words"),
    [
        (1 << 16, 12_800_000, "2k was best"),
        (1 << 16, 128_000_000, "8k was best"),
        (90_000, 1_280_000_000, ""),
        (90_112, 13_000_000_000, ""),
        (1 << 20, 13_000_000_000, "no published run shows a gain beyond 256k"),
        (256, 10_000, ""),
        (1 << 20, None, ""),
    ],
)
def test_a_batch_too_large_for_its_data_is_said(batch: int, samples: int | None, words: str) -> None:
    said = oversized_batch_warning(batch, samples)
    assert words in said and bool(said) == bool(words)
