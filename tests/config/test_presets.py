"""Every preset composes, and every model builds on the meta device, which allocates nothing."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from clipscale.cli import compose
from clipscale.common.errors import UserError
from clipscale.config.presets import group_options
from clipscale.config.setting import flat
from clipscale.config.train import TrainConfig, check
from clipscale.models.towers import build_model
from clipscale.step.optim import build_optimizer

OPTIONS = group_options()


def composed(*overrides: str) -> TrainConfig:
    """The settings of `clipscale train` with these words."""
    _, words = compose.overrides("train", [*overrides, "data.train=x.tar"])
    return check(compose.settings("train", words))


@pytest.mark.parametrize("name", OPTIONS["experiment"])
def test_a_preset_composes_and_its_model_and_optimizer_build(name: str) -> None:
    config = composed(f"experiment={name}")
    with torch.device("meta"):
        model = build_model(config.model)
    optimizer = build_optimizer(model, config.optim)
    assert sum(len(group["params"]) for group in optimizer.param_groups) > 0
    trained = [tower for tower in (model.image, model.text) if any(p.requires_grad for p in tower.parameters())]
    assert len(trained) == (1 if config.model.freeze_image else 2)


@pytest.mark.parametrize("name", OPTIONS["model"])
def test_a_model_of_the_group_builds(name: str) -> None:
    config = composed(f"model={name}")
    with torch.device("meta"):
        model = build_model(config.model)
    assert model.logit_scale.is_meta
    assert model.image_size == (30 if name == "tiny" else 224)


@pytest.mark.parametrize("name", OPTIONS["optim"])
def test_an_optimizer_of_the_group_takes_a_step(name: str) -> None:
    config = composed(f"optim={name}", "model=tiny")
    model = build_model(config.model)
    optimizer = build_optimizer(model, config.optim)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before))


GROUPS = ("data", "loss", "schedule", "precision", "log")


@pytest.mark.parametrize("word", [f"{group}={name}" for group in GROUPS for name in OPTIONS[group]])
def test_every_other_choice_composes(word: str) -> None:
    composed(word)


INFCL = {
    "optim": {"name": "adafactorbv", "lr": 1e-3, "weight_decay": 1e-4, "betas": (0.9, 0.95)},
    "schedule": {"name": "cosine", "warmup": "0.5ep"},
    "data": {"augment": {"ratio": (0.75, 1.33), "scale": (0.08, 1.0)}},
    "precision": {"name": "fp16"},
    "epochs": 8,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "openclip-vit-b32-laion400m": {
        "optim": {"name": "adamw", "lr": 5e-4, "weight_decay": 0.2, "betas": (0.9, 0.98), "eps": 1e-6},
        "schedule": {"name": "cosine", "warmup": "2000"},
        "data": {"augment": {"scale": (0.9, 1.0)}},
        "model": {"name": "ViT-B-32", "freeze_image": False},
        "batch": 32_768,
        "epochs": 32,
    },
    "infcl-vit-b16-lit": INFCL | {"model": {"freeze_image": True}},
    "infcl-vit-l14": INFCL | {"model": {"freeze_image": False}},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_published_one(name: str) -> None:
    values = dict(flat(asdict(composed(f"experiment={name}"))))
    published = dict(flat(PUBLISHED[name]))
    assert {key: values[key] for key in published} == published


def test_the_command_line_overrides_a_preset() -> None:
    config = composed(
        "experiment=infcl-vit-l14", "model=tiny", "optim=adamw", "optim.lr=3e-4", "batch=1k", "samples=4k"
    )
    assert (config.model.name, config.optim.name, config.optim.lr) == ("tiny", "adamw", 3e-4)
    assert (config.batch, config.samples, config.epochs) == (1024, 4096, None)


@pytest.mark.parametrize(
    ("words", "optim"),
    [
        ("experiment=infcl-vit-l14 optim=lion", {"name": "lion", "lr": 5e-5, "weight_decay": 2.0, "clip_norm": 1.0}),
        ("optim=adamw experiment=demo", {"name": "adamw", "lr": 5e-4, "betas": (0.9, 0.98), "eps": 1e-6}),
        ("experiment=demo optim.lr=3 optim=adamw", {"name": "adamw", "lr": 3.0}),
    ],
)
def test_an_optimizers_preset_beside_an_experiment_brings_its_rate_and_decay(words: str, optim: dict[str, Any]) -> None:
    assert optim.items() <= asdict(composed(*words.split()).optim).items()


def test_another_model_or_loss_beside_an_experiment_is_that_one_or_refused(tmp_path: Path) -> None:
    """The experiment's own model under another's name would be neither."""
    with pytest.raises(UserError, match="experiment=infcl-vit-b16-lit has its own"):
        composed("experiment=infcl-vit-b16-lit", "model=vit-b32")
    locked = composed("experiment=infcl-vit-b16-lit", "loss=siglip").model
    assert (locked.name, locked.freeze_image, locked.init_bias) == ("LiT-B-16", True, -10)
    (tmp_path / "experiment").mkdir()
    mine = "# @package _global_\nloss:\n  objective: softmax_text\nmodel:\n  init_bias: 3.0\n  compile: true\n"
    (tmp_path / "experiment/mine.yaml").write_text(mine)
    for given, wanted in {"siglip": ("sigmoid", -10), "ring": ("softmax", 3), "infcl": ("softmax", 3)}.items():
        config = compose.settings("train", [f"loss={given}", "experiment=mine", "model=tiny"], str(tmp_path))
        assert (config.loss.objective, config.model.init_bias) == wanted
        assert (config.model.name, config.model.compile) == ("tiny", True)


def test_the_sigmoid_loss_comes_with_its_bias() -> None:
    config = composed("loss=siglip", "model=tiny")
    assert config.loss.objective == "sigmoid"
    assert build_model(config.model).logit_bias is not None
