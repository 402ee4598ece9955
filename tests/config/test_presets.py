"""Every preset composes, and every model builds on the meta device, which allocates nothing."""

import pytest
import torch

from clipscale.cli import compose
from clipscale.config.presets import group_options
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


@pytest.mark.parametrize("number", range(len(OPTIONS["loss"])))
def test_every_other_choice_composes(number: int) -> None:
    """One of each group at a time; losses are the most."""
    groups = {group: OPTIONS[group] for group in ("data", "loss", "schedule", "precision", "log")}
    assert all(len(names) <= len(OPTIONS["loss"]) for names in groups.values())
    composed(*(f"{group}={names[number % len(names)]}" for group, names in groups.items()))


def test_the_openclip_preset_is_the_published_one() -> None:
    config = composed("experiment=openclip-vit-b32-laion400m")
    assert (config.model.name, config.batch, config.epochs) == ("ViT-B-32", 32_768, 32)
    assert (config.optim.name, config.optim.lr, config.optim.weight_decay) == ("adamw", 5e-4, 0.2)
    assert (config.optim.betas, config.optim.eps) == ((0.9, 0.98), 1e-6)
    assert (config.schedule.name, config.schedule.warmup) == ("cosine", "2000")
    assert config.data.augment.scale == (0.9, 1.0)


@pytest.mark.parametrize("name", ["infcl-vit-b16-lit", "infcl-vit-l14"])
def test_the_infcl_presets_are_the_published_ones(name: str) -> None:
    config = composed(f"experiment={name}")
    assert (config.optim.name, config.optim.lr, config.optim.weight_decay) == ("adafactorbv", 1e-3, 1e-4)
    assert config.optim.betas == (0.9, 0.95)
    assert (config.schedule.name, config.schedule.warmup, config.epochs) == ("cosine", "0.5ep", 8)
    assert (config.data.augment.ratio, config.data.augment.scale) == ((0.75, 1.33), (0.08, 1.0))
    assert config.precision.name == "fp16"
    assert config.model.freeze_image == name.endswith("lit")


def test_the_command_line_overrides_a_preset() -> None:
    config = composed(
        "experiment=infcl-vit-l14", "model=tiny", "optim=adamw", "optim.lr=3e-4", "batch=1k", "samples=4k"
    )
    assert (config.model.name, config.optim.name, config.optim.lr) == ("tiny", "adamw", 3e-4)
    assert (config.batch, config.samples, config.epochs) == (1024, 4096, None)


def test_the_demo_needs_the_cache() -> None:
    config = composed("experiment=demo")
    assert config.batch > int(config.cache.chunk)
    assert len(config.eval.sets) == 3


def test_the_sigmoid_loss_comes_with_its_bias() -> None:
    config = composed("loss=siglip", "model=tiny")
    assert config.loss.objective == "sigmoid"
    assert build_model(config.model).logit_bias is not None
