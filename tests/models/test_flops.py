"""FLOPs of a step follow from what trains, layer by layer."""

from dataclasses import replace

import pytest
import torch

from clipscale.config.model import ModelConfig, TowerConfig
from clipscale.models.flops import Flops, decoder_flops, image_flops, text_flops, trained_names, unbuilt_encoders
from clipscale.models.towers import build_model
from tests.models.test_towers import SMALL
from tests.support.cases import slow_except
from tests.support.towers import captioner_architecture

W = 32
PATCHES = 4
LAYERS = 2
FEATURES = 16
EMBED = 2 * PATCHES * (3 * 6 * 6) * W
PROJECT = 2 * W * FEATURES


def block(tokens: int) -> dict[str, int]:
    """FLOPs of a block's forward pass by layer."""
    linear = 2 * tokens * W * W
    return {"qkv": 3 * linear, "attention": 2 * 2 * tokens * tokens * W, "out": linear, "mlp": 2 * 4 * linear}


IMAGE = block(PATCHES + 1)
TEXT = block(8)
IMAGE_FORWARD = EMBED + LAYERS * sum(IMAGE.values()) + PROJECT
TEXT_FORWARD = LAYERS * sum(TEXT.values()) + PROJECT


def adapted(layers: dict[str, int]) -> int:
    """Counts what adapters in frozen blocks add: the inputs' gradients from the first adapter on, and attention's two
    products."""
    blocks = LAYERS * (2 * layers["attention"] + layers["out"] + layers["mlp"])
    return blocks + (LAYERS - 1) * layers["qkv"] + PROJECT


CASES = {
    "full": ({}, 2 * IMAGE_FORWARD, 2 * TEXT_FORWARD),
    "image frozen": ({"image": TowerConfig(train="none")}, 0, 2 * TEXT_FORWARD),
    "text frozen": ({"text": TowerConfig(train="none")}, 2 * IMAGE_FORWARD, 0),
    "projection": ({"image": TowerConfig(train="1")}, PROJECT, 2 * TEXT_FORWARD),
    "last two groups": (
        {"image": TowerConfig(train="2")}, 2 * (sum(IMAGE.values()) + PROJECT), 2 * TEXT_FORWARD
    ),
    "adapters": ({"lora": 2}, adapted(IMAGE), adapted(TEXT)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_backward_pass_computes_what_trains_and_what_lies_above_it(case: str) -> None:
    settings, image, text = CASES[case]
    if case == "adapters":
        pytest.importorskip("peft", reason="peft is not installed (clipscale[lora])")
    config = ModelConfig(name="small", architecture=SMALL, **settings)
    model = build_model(config)
    assert image_flops(config, trained_names(model.image.encoder)) == (IMAGE_FORWARD, image)
    assert text_flops(config, trained_names(model.text.encoder)) == (TEXT_FORWARD, text)
    flops = Flops.of_model(config, model, torch.device("cpu"))
    assert flops.per_sample() == IMAGE_FORWARD + image + TEXT_FORWARD + text
    assert flops.utilisation(100.0) is None, "a CPU's peak is not known"


DEEP = {
    **SMALL,
    "vision_cfg": {**SMALL["vision_cfg"], "layers": 6},
    "text_cfg": {**SMALL["text_cfg"], "layers": 7},
}


@pytest.mark.parametrize("train", slow_except(["all", "3"], ["all", "none", "1", "3", "5"]))
def test_two_of_many_blocks_count_for_all(train: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some cases train the upper blocks alone. The encoders, which are shared, keep their blocks."""
    config = ModelConfig(name="deep", architecture=DEEP, image=TowerConfig(train=train), text=TowerConfig(train=train))
    model = build_model(config)
    image, text = (trained_names(tower.encoder) for tower in (model.image, model.text))
    counted = image_flops(config, image), text_flops(config, text)
    assert len(list(unbuilt_encoders(config).visual.parameters())) == len(list(model.image.parameters()))
    monkeypatch.setattr("clipscale.models.blocks.repeated_blocks", lambda tower: ([], []))
    other = replace(config, name="counted anew")
    assert counted == (image_flops(other, image), text_flops(other, text))


def test_a_captioners_decoder_costs_its_layers_and_the_vocabulary() -> None:
    """The backward pass costs twice the forward pass, because everything below the decoder trains, too."""
    config = ModelConfig(name="small", architecture=captioner_architecture(12, 6, 8, 50))
    model = build_model(config)
    labels = 5
    seen = 5
    width = 32
    across = 2 * labels * width * width * (1 + 1 + 8) + 2 * seen * width * width * 2 + 2 * 2 * labels * seen * width
    forward = 2 * (sum(block(labels).values()) + across) + 2 * labels * width * 50
    assert decoder_flops(config, trained_names(model.decoder), labels + 1) == (forward, 2 * forward)
    with_decoder = Flops.of_model(config, model, torch.device("cpu")).per_sample({6: 3})
    model.decoder.requires_grad_(False)
    alone = Flops.of_model(config, model, torch.device("cpu")).per_sample({6: 3})
    assert with_decoder - alone == 3 * forward


def test_short_captions_cost_less() -> None:
    config = ModelConfig(name="small", architecture=SMALL)
    flops = Flops.of_model(config, build_model(config), torch.device("cpu"))
    short = 3 * (LAYERS * sum(block(4).values()) + PROJECT)
    assert flops.per_sample({4: 3, 8: 1}) - flops.image_flops == (3 * short + 3 * TEXT_FORWARD) / 4


def test_a_length_that_cannot_be_counted_leaves_the_next_ones_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(name="small", architecture=SMALL)
    whole = text_flops(config)
    with monkeypatch.context() as patch, pytest.raises(AttributeError):
        patch.setattr("clipscale.models.flops.flop_registry", None)
        text_flops(config, length=4)
    assert text_flops(config, length=SMALL["text_cfg"]["context_length"]) == whole


def test_forward_flops_are_the_published_ones() -> None:
    """OpenCLIP's model profile gives 4.41 and 2.98 GMACs for the towers of ViT-B/32: twice that in FLOPs."""
    config = ModelConfig(name="ViT-B-32")
    assert image_flops(config).forward / 2e9 == pytest.approx(4.41, rel=0.02)
    assert text_flops(config).forward / 2e9 == pytest.approx(2.98, rel=0.02)
