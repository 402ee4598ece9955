"""Every preset composes, and every model builds on the meta device, which allocates nothing."""

import json
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from clipscale.cli.compose import compose_settings
from clipscale.cli.train_verb import with_defaults
from clipscale.cli.verbs import VERBS
from clipscale.cli.words import overrides_of
from clipscale.common import files
from clipscale.config.checks import check_across_sections
from clipscale.config.config_file import plain_fields
from clipscale.config.model import ModelConfig
from clipscale.config.presets import conf_dir, group_options, preset_title
from clipscale.config.setting import flatten
from clipscale.config.train_config import TrainConfig
from clipscale.eval.published import parse_bands
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights.load_weights import without_weights
from clipscale.step.optim import build_optimizer
from tests.support.towers import small_model

pytestmark = pytest.mark.usefixtures("hydra_itself")
OPTIONS = group_options()


def composed(*overrides: str) -> TrainConfig:
    """The settings of `clipscale train` with these words."""
    _, words = overrides_of("train", [*overrides, "data.train=x.tar"])
    config = compose_settings("train", words)
    check_across_sections(config)
    return with_defaults(config)


MODELS: dict[str, ClipModel] = {}


def built(config: ModelConfig) -> ClipModel:
    """The model; recipes of the same model share one."""
    key = repr(config)
    if key not in MODELS:
        with torch.device("meta"):
            MODELS[key] = build_model(config)
    return MODELS[key]


RECIPES = files.read_yaml(Path(__file__).with_name("recipes.yaml"))
# They have no source, and name no score.
OWN = {"demo", "demo-coca", "finetune", "finetune-lora", "finetune-head"}
# Where the source gives a range; else the band is a point around the published score.
RANGES = {"cc3m-rn50": (18.5, 20.0), "datacomp-small": (2.5, 5.1), "datacomp-medium": (17.6, 27.3)}


@pytest.mark.parametrize("name", OPTIONS["experiment"])
def test_a_preset_is_the_published_recipe_and_its_model_and_optimizer_build(name: str) -> None:
    config = composed(f"experiment={name}")
    model = built(without_weights(config.model))
    optimizer = build_optimizer(model, config.optim)
    assert sum(len(group["params"]) for group in optimizer.param_groups) > 0
    trained = [tower for tower in (model.image, model.text) if any(p.requires_grad for p in tower.parameters())]
    assert len(trained) == (1 if config.model.image.train == "none" else 2)
    recipe, comment = dict(RECIPES.get(name, {"source": "", "accuracy": []})), preset_title("experiment", name)
    assert bool(recipe.pop("source")) == (name not in OWN)
    accuracy = recipe.pop("accuracy")
    scores = " % and then ".join(map(str, accuracy))
    assert (f"{scores} % zero-shot on ImageNet" in comment) if scores else "%" not in comment
    bands = parse_bands(config.expected)
    assert bool(bands) == bool(scores), "a recipe without a published score expects none"
    if scores:
        band = RANGES.get(name) or (accuracy[-1] - 1, accuracy[-1] + 1)
        assert bands["imagenet1k.top1"] == pytest.approx(band)
    values = dict(flatten(json.loads(json.dumps(asdict(config, dict_factory=plain_fields)))))
    assert {key: values[key] for key in recipe} == recipe


def models_of_experiments() -> set[str]:
    """The presets of models that experiments choose: they are built above."""
    experiments = [files.read_yaml(conf_dir() / "experiment" / f"{name}.yaml") for name in OPTIONS["experiment"]]
    choices = [choice for preset in experiments for choice in preset.get("defaults", []) if isinstance(choice, dict)]
    return {choice["override /model"] for choice in choices if "override /model" in choice}


GROUPS = {group: names for group, names in OPTIONS.items() if group != "experiment"}
GROUPS["model"] = ["tiny", *(name for name in GROUPS["model"] if name not in models_of_experiments())]


@pytest.mark.parametrize("names", [*zip_longest(*GROUPS.values())], ids=str)
def test_presets_of_all_groups_compose_their_model_builds_and_their_optimizer_takes_a_step(names: list[str]) -> None:
    chosen = {group: name for group, name in zip(GROUPS, names) if name}
    config = composed(*map("=".join, chosen.items()))
    with torch.device("meta"):
        built = build_model(config.model)
    assert built.logit_scale.is_meta
    assert built.image_size == (30 if chosen.get("model") == "tiny" else 224)
    model = small_model()
    optimizer = build_optimizer(model, config.optim)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before))


@pytest.mark.parametrize(
    "name", ["siglip-b16", *(pytest.param(n, marks=pytest.mark.slow) for n in ("infcl-vit-b16-lit", "clipa-b16"))]
)
def test_a_recipe_can_be_planned(name: str) -> None:
    words = [f"experiment={name}", "hardware=h100-80g", "gpus=8", "cache.chunk=8"]
    config = compose_settings("plan", overrides_of("plan", words)[1])
    VERBS["plan"].check(config)
    assert config.batch == composed(f"experiment={name}").batch


def test_a_preset_may_set_what_another_verb_has() -> None:
    embed, train = (compose_settings(verb, ["data=demo"]) for verb in ("embed", "train"))
    assert embed.data.train == train.data.train


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
def test_an_optimizers_preset_beside_an_experiment_brings_its_rate_and_decay(words: str, optim: dict) -> None:
    assert optim.items() <= asdict(composed(*words.split()).optim).items()


def test_another_model_or_loss_beside_an_experiment_is_that_one(tmp_path: Path) -> None:
    other = composed("experiment=infcl-vit-b16-lit", "model=vit-b32").model
    assert (other.name, other.architecture, other.image.train) == ("ViT-B-32", {}, "none")
    locked = composed("experiment=infcl-vit-b16-lit", "loss=siglip").model
    assert (locked.name, locked.image.train, locked.init_bias) == ("LiT-B-16", "none", -10)
    (tmp_path / "experiment").mkdir()
    mine = "# @package _global_\nloss:\n  objective: softmax_text\nmodel:\n  init_bias: 3.0\n  compile: true\n"
    (tmp_path / "experiment/mine.yaml").write_text(mine)
    for given, expected in {"siglip": ("sigmoid", -10), "ring": ("softmax", 3), "infcl": ("softmax", 3)}.items():
        config = compose_settings("train", [f"loss={given}", "experiment=mine", "model=tiny"], str(tmp_path))
        assert (config.loss.objective, config.model.init_bias) == expected
        assert (config.model.name, config.model.compile) == ("tiny", "true")
