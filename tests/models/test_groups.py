"""Layer groups: which parameters of a tower train, and at which share of the learning rate."""

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.model import ModelConfig, TowerConfig
from clipscale.config.sections import OptimConfig, ScheduleConfig
from clipscale.models.groups import layer_groups, lock, lr_factors
from clipscale.models.towers import build_model
from clipscale.step.optim import Schedule, build_optimizer, set_lr

GROUPS = files.read_yaml(Path(__file__).with_name("groups.yaml"))
TEXT = {"context_length": 8, "vocab_size": 99, "width": 32, "heads": 2, "layers": 3}
VIT = {"image_size": 12, "layers": 3, "width": 32, "head_width": 16, "patch_size": 6}
RESNET = {"image_size": 32, "layers": [1, 2, 1, 1], "width": 8, "head_width": 64}
CONVNEXT = {"timm_model_name": "convnext_atto", "timm_pool": "avg", "timm_proj": "linear", "image_size": 32}
SIGLIP = {"timm_model_name": "test_vit", "timm_pool": "map", "timm_proj": "none", "image_size": 160}


def config(vision: dict[str, Any] = VIT, **settings: Any) -> ModelConfig:
    return ModelConfig("small", {"embed_dim": 64, "vision_cfg": vision, "text_cfg": TEXT}, **settings)


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")
    about = transformers.BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
    return open_clip.hf_model.HFTextEncoder("", 8, about, "cls_pooler", "linear")


@pytest.mark.parametrize(
    ("tower", "name"),
    [(VIT, "vit"), (RESNET, "resnet"), (CONVNEXT, "convnext"), (SIGLIP, "siglip"), (bert, "bert")],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_groups_are_open_clips_and_timms(tower: Any, name: str) -> None:
    last, group_of = GROUPS[name]
    encoder = tower() if callable(tower) else build_model(config(tower)).image.encoder
    groups = layer_groups(encoder, "image")
    assert sorted(name for names in groups for name in names) == sorted(n for n, _ in encoder.named_parameters())
    assert {name: g for g, names in enumerate(groups) for name in names if name in group_of} == group_of
    assert len(groups) == last + 1


@pytest.mark.parametrize("settings", [{"layer_decay": 0.5}, {"train": "1"}, {"train": "1", "layer_decay": 0.5}])
def test_a_tower_whose_blocks_have_unknown_names_is_refused(settings: dict[str, Any]) -> None:
    """open_clip's newer text towers have such names. One group of all layers would train and decay other weights than
    asked for."""
    blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    tower = nn.ModuleDict({"token_embedding": nn.Embedding(9, 4), "blocks": blocks, "norm": nn.LayerNorm(4)})
    asked = TowerConfig(**settings)
    with pytest.raises(UserError, match=r"model\.text: the blocks of ModuleDict are not known.*layer_decay=1"):
        lock(tower, "text", asked.groups or 0)
        lr_factors(tower, "text", asked)
    lock(tower, "text", 0)
    assert not any(p.requires_grad for p in tower.parameters())
    assert set(lr_factors(tower, "text", TowerConfig(lr_factor=0.5)).values()) == {0.5}


def test_rates_are_multiplied_with_the_schedule_and_scale_the_step() -> None:
    settings = config(image=TowerConfig(lr_factor=0.5, layer_decay=0.25), text=TowerConfig(lr_factor=0.1))
    model = build_model(settings)
    plain = OptimConfig(name="momentum", lr=1.0, betas=(0.0, 0.0), weight_decay=0.0)
    optimizer = build_optimizer(model, plain, lr_factors=model.lr_factors(settings))
    lr = Schedule.build(ScheduleConfig(warmup="10"), OptimConfig(lr=1.0), 1, 100, None, 0).lr(5)
    set_lr(optimizer, lr)
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    expected = {"logit_scale": 1.0, "text.encoder.token_embedding.weight": 0.1, "text.encoder.text_projection": 0.1}
    expected |= {"image.encoder.proj": 0.5, "image.encoder.conv1.weight": 0.5 * 0.25**4}
    expected |= {f"image.encoder.transformer.resblocks.{i}.ln_1.weight": 0.5 * 0.25 ** (3 - i) for i in range(3)}
    before = {name: model.get_parameter(name).detach().clone() for name in expected}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for name, factor in expected.items():
        p = model.get_parameter(name)
        assert rate[id(p)] == lr * factor == 0.5 * factor, name
        assert torch.allclose(before[name] - p, torch.full_like(p, 0.5 * factor), atol=1e-6), name


def test_the_last_groups_train_and_frozen_statistics_stay() -> None:
    model = build_model(config(RESNET, image=TowerConfig(train="2"), text=TowerConfig(train="none")))
    for name, p in model.image.encoder.named_parameters():
        assert p.requires_grad == name.startswith(("layer4.", "attnpool.")), name
    assert not any(p.requires_grad for p in model.text.parameters())
    assert model.image.encoder.training and not model.text.encoder.training
    for name, module in model.image.encoder.named_modules():
        assert not isinstance(module, _BatchNorm) or module.training == name.startswith("layer4."), name
    with pytest.raises(UserError, match=r"model.image.train=9: the tower has 5 groups; choose"):
        build_model(config(image=TowerConfig(train="9")))
