"""Every preset composes, and every model builds on the meta device, which allocates nothing."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from clipscale.cli import compose
from clipscale.cli.verbs import VERBS
from clipscale.common.errors import UserError
from clipscale.config.presets import about, group_options
from clipscale.config.setting import flat
from clipscale.config.train import TrainConfig, check, settled
from clipscale.models.towers import build_model
from clipscale.step.optim import build_optimizer
from clipscale.tools.plan.planner import predicted
from clipscale.tools.plan.settings import PlanConfig

OPTIONS = group_options()


def composed(*overrides: str) -> TrainConfig:
    """The settings of `clipscale train` with these words."""
    _, words = compose.overrides("train", [*overrides, "data.train=x.tar"])
    config = compose.settings("train", words)
    check(config)
    return settled(config)


@pytest.mark.parametrize("name", OPTIONS["experiment"])
def test_a_preset_composes_and_its_model_and_optimizer_build(name: str) -> None:
    config = composed(f"experiment={name}")
    with torch.device("meta"):
        model = build_model(config.model)
    optimizer = build_optimizer(model, config.optim)
    assert sum(len(group["params"]) for group in optimizer.param_groups) > 0
    trained = [tower for tower in (model.image, model.text) if any(p.requires_grad for p in tower.parameters())]
    assert len(trained) == (1 if config.model.image.train == "none" else 2)


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


GROUPS = ("data", "loss", "schedule", "log")


@pytest.mark.parametrize("word", [f"{group}={name}" for group in GROUPS for name in OPTIONS[group]])
def test_every_other_choice_composes(word: str) -> None:
    composed(word)


INFCL = "Inf-CL, scripts/laion400m"
CARD = "the model's card at huggingface.co/laion"
DATACOMP = "datacomp, scale_configs.py; arXiv 2304.14108, table 3"
FIELDS = ("source", "accuracy", "model", "samples", "batch", "lr", "warmup", "betas", "weight_decay")
METACLIP = "MetaCLIP, configs/metaclip_v1.py, metaclip_v2.py"
OPENCLIP = "open_clip, docs/PRETRAINED.md"
OLD, NEW = (0.9, 0.98), (0.9, 0.95)
CLIPA = "CLIPA, clipa_torch/scripts/exp/gpu; arXiv 2305.07017, table 4"
APPLE = "arXiv 2508.20691; ml-mobileclip, training/configs"
WORLD = "ViT-H-14-worldwide-quickgelu"
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "openclip-vit-b32-laion400m": (OPENCLIP, 62.96, "ViT-B-32-quickgelu", None, 32_768, 5e-4, "2000", OLD, 0.2),
    "laion2b-b32": (CARD, 66.5, "ViT-B-32", 34_700_000_000, 79_104, 1e-3, "2000", OLD, 0.2),
    "laion2b-b16": (CARD, 70.1, "ViT-B-16", 34_200_000_000, 88_064, 1e-3, "10000", OLD, 0.2),
    "laion2b-l14": (CARD, 75.3, "ViT-L-14", 32_000_000_000, 86_016, 1e-3, "10000", OLD, 0.2),
    "laion2b-h14": (CARD, 77.9, "ViT-H-14", 34_700_000_000, 79_104, 5e-4, "2000", OLD, 0.2),
    "datacomp-small": (DATACOMP, 3.9, "ViT-B-32", 12_800_000, 4_096, 5e-4, "500", OLD, 0.2),
    "datacomp-medium": (DATACOMP, 29.7, "ViT-B-32", 128_000_000, 4_096, 5e-4, "500", OLD, 0.2),
    "datacomp-large": (DATACOMP, 63.1, "ViT-B-16", 1_280_000_000, 8_192, 5e-4, "500", OLD, 0.2),
    "datacomp-xlarge": (DATACOMP, 79.2, "ViT-L-14", 12_800_000_000, 90_112, 1e-3, "10000", NEW, 0.2),
    "metaclip-b32": (METACLIP, 65.5, "ViT-B-32-quickgelu", 12_800_000_000, 32_768, 5e-4, "2000", OLD, 0.2),
    "metaclip-b16": (METACLIP, 70.8, "ViT-B-16-quickgelu", 12_800_000_000, 32_768, 5e-4, "2000", OLD, 0.2),
    "metaclip2-h14": (METACLIP, None, WORLD, 32 * 920_000_000, 384 * 196, 4e-4, "2000", NEW, 0.1),
    "clipa-b16": (CLIPA, (59.7, 63.2), "ViT-B-16", 2_531_072_000, 65_536, 2.048e-3, "782", NEW, 0.2),
    "clipa-l16": (CLIPA, (57.9, 69.3), "ViT-L-16-GAP", 2_531_072_000, 32_768, 1.024e-3, "1563", NEW, 0.2),
    "mobileclip2-b": (APPLE, 79.4, "MobileCLIP2-B", 200_000 * 65_536, 65_536, 1e-3, "1000", NEW, 0.2),
    "siglip-b16": ("arXiv 2303.15343", 73.4, "ViT-B-16-SigLIP", 9_000_000_000, 32_768, 1e-3, None, NEW, 1e-4 / 1e-3),
    "infcl-vit-b32": (INFCL, None, "ViT-B-32", 8 * 280_321_756, 262_144, 5e-4, "534", OLD, 0.5),
    "infcl-vit-b16-lit": (INFCL, None, "LiT-B-16", 8 * 280_321_756, 262_144, 1e-3, "534", NEW, 1e-4),
    "infcl-vit-l14": ("as infcl-vit-b16-lit", None, "ViT-L-14", 8 * 280_321_756, 262_144, 1e-3, "534", NEW, 1e-4),
}  # fmt: skip
"""Recipe -> what its source says, by FIELDS; None: nothing. `accuracy`: zero-shot on ImageNet, in per cent."""
ADAMW = {"optim.name": "adamw", "optim.eps": 1e-6, "optim.clip_norm": None, "data.augment.scale": (0.9, 1.0)}
ADAFACTOR = {"optim.name": "adafactorbv", "optim.eps": None, "optim.clip_norm": 1.0}
CLIPPED = ADAFACTOR | {"optim.options.clipping_threshold": 1.0, "data.augment.scale": (0.08, 1.0)}
CROPS = ADAMW | {"data.augment.scale": (0.4, 1.0), "precision": "bf16"}
PRETRAINED = {"samples": 6 * 400_000_000}
TUNED = {"samples": 131_072_000, "batch": 8_192, "lr": 2.56e-5, "warmup": "3072", "optimizer": "restart"}
LONGER = {"batch": 7_168, "lr": 2.24e-5, "warmup": "3571"}
FURTHER: dict[str, dict[str, Any]] = dict.fromkeys(PUBLISHED, ADAMW) | {
    "openclip-vit-b32-laion400m": ADAMW | {"epochs": 32, "precision": "fp16"},
    "laion2b-l14": ADAMW | {"model.preprocess.mean": [0.5] * 3, "precision": "fp32"},
    "metaclip2-h14": ADAMW | {"precision": "bf16"},
    "clipa-b16": CROPS | {"model.context_length": 16, "stages": [PRETRAINED | {"image_size": 112}, TUNED]},
    "clipa-l16": CROPS
    | {"data.augment.jitter": (0.32, 0.32, 0.32, 0.08), "data.augment.greyscale": 0.2, "model.context_length": None}
    | {"model.architecture.text_cfg.context_length": 32, "model.architecture.vision_cfg.pool_type": "avg"}
    | {"stages": [PRETRAINED | {"image_size": 96, "context_length": 8}, TUNED | LONGER]},
    "mobileclip2-b": ADAMW
    | {
        "optim.clip_norm": 1.0,
        "distill.scales": [70.0, 60.0],
        "distill.weights": (0.0, 1.0),
        "model.preprocess.mean": [0.0] * 3,
    }
    | {"data.augment.scale": (0.08, 1.0)},
    "siglip-b16": ADAFACTOR
    | {"loss.objective": "sigmoid", "model.context_length": 16, "model.init_scale": 10.0, "model.init_bias": -10.0},
    "infcl-vit-b32": ADAMW | {"optim.eps": 1e-8, "data.augment.scale": (0.08, 1.0), "precision": "fp16"},
    "infcl-vit-b16-lit": CLIPPED | {"model.image.train": "none", "model.architecture.vision_cfg.timm_proj": "linear"},
    "infcl-vit-l14": CLIPPED | {"model.image.train": "all", "model.architecture": {}},
}


def planned(name: str) -> PlanConfig:
    """The settings of `clipscale plan` with a recipe, checked."""
    words = [f"experiment={name}", "hardware=h100-80g", "gpus=8", "cache.chunk=8"]
    words += ["model.batch_norm=frozen"] if name == "mobileclip2-b" else []  # a dry run of ranks synchronises none
    config: PlanConfig = compose.settings("plan", compose.overrides("plan", words)[1])
    VERBS["plan"].check(config)
    return config


@pytest.mark.parametrize("name", OPTIONS["experiment"])
def test_a_recipe_is_the_published_one(name: str) -> None:
    if name == "demo":  # not published
        return
    published = dict(zip(FIELDS, PUBLISHED[name], strict=True))
    config = composed(f"experiment={name}")
    assert planned(name).batch == config.batch
    header, accuracy = about("experiment", name), published["accuracy"]
    scores = " % and then ".join(map(str, accuracy if isinstance(accuracy, tuple) else [accuracy]))
    assert (f"{scores} % zero-shot on ImageNet" in header) if accuracy else "%" not in header
    found = {"model": config.model.name, "samples": config.samples, "batch": config.batch, "lr": config.optim.lr}
    found |= {"betas": config.optim.betas, "weight_decay": config.optim.weight_decay}
    found |= {"warmup": published["warmup"] and config.schedule.warmup}
    assert found == {key: published[key] for key in found}
    values = dict(flat(asdict(config)))
    assert {key: values[key] for key in FURTHER[name]} == FURTHER[name]
    assert (config.samples is None) != (config.epochs is None)
    assert config.schedule.name == "cosine"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_is_planned(name: str) -> None:
    """In chunks of a few samples: what the settings make of the model is of interest here."""
    config = planned(name)
    result = predicted(config, search=False)
    assert result["local_batch"] * 8 == config.batch == PUBLISHED[name][FIELDS.index("batch")]
    assert result["time"]["hours"] or config.samples is None


def test_a_preset_may_set_what_another_verb_has() -> None:
    assert (
        compose.settings("embed", ["data=demo", "out=x"]).data.train
        == compose.settings("train", ["data=demo"]).data.train
    )
    with pytest.raises(UserError, match=r"eval\.sets: embed does not use it"):
        compose.settings("embed", ["data=demo", "eval.sets=[a]"])


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
    assert (locked.name, locked.image.train, locked.init_bias) == ("LiT-B-16", "none", -10)
    (tmp_path / "experiment").mkdir()
    mine = "# @package _global_\nloss:\n  objective: softmax_text\nmodel:\n  init_bias: 3.0\n  compile: true\n"
    (tmp_path / "experiment/mine.yaml").write_text(mine)
    for given, wanted in {"siglip": ("sigmoid", -10), "ring": ("softmax", 3), "infcl": ("softmax", 3)}.items():
        config = compose.settings("train", [f"loss={given}", "experiment=mine", "model=tiny"], str(tmp_path))
        assert (config.loss.objective, config.model.init_bias) == wanted
        assert (config.model.name, config.model.compile) == ("tiny", True)
