"""The towers give open_clip's features, and freeze as asked."""

from typing import Any

import open_clip
import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.transforms.functional import normalize

from clipscale.common.errors import UserError
from clipscale.config.model import ModelConfig
from clipscale.models.towers import build_model
from clipscale.step.cache.batch_norm import batch_norms
from tests.support.towers import architecture, small_model

SMALL = architecture()


def small_config(**settings: Any) -> ModelConfig:
    return ModelConfig(name="small", architecture=SMALL, **settings)


def test_features_are_open_clips_on_the_same_pixels() -> None:
    torch.manual_seed(0)
    model = build_model(small_config()).eval()
    reference = open_clip.model.CustomTextCLIP(**SMALL).eval()
    reference.visual.load_state_dict(model.image.encoder.state_dict())
    reference.text.load_state_dict(model.text.encoder.state_dict())
    pixels = torch.randint(0, 256, (5, 3, 12, 12), dtype=torch.uint8)
    tokens = model.tokenizer(["a red square", "two circles", "", "x " * 50, "déjà vu"])
    mean = open_clip.OPENAI_DATASET_MEAN
    std = open_clip.OPENAI_DATASET_STD
    normal = torch.stack([normalize(p.float() / 255, mean, std) for p in pixels])
    assert torch.allclose(model.image(pixels), reference.encode_image(normal, normalize=True), atol=1e-5)
    assert torch.allclose(model.text(tokens.to(torch.int32)), reference.encode_text(tokens, normalize=True), atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = model.image(pixels)
    assert rows.dtype == torch.float32 and torch.allclose(rows.norm(dim=1), torch.ones(5), atol=1e-6)


def test_scale_and_bias_start_as_asked() -> None:
    model = build_model(small_config())
    assert (model.logit_scale.exp().item(), model.logit_bias) == (pytest.approx(1 / 0.07), None)
    model = build_model(small_config(init_scale=10.0, init_bias=-10.0))
    assert (model.logit_scale.exp().item(), model.logit_bias) == (pytest.approx(10.0), -10.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(name="ViT-B32"), "model.name='ViT-B32' is not an open_clip architecture; did you mean 'ViT-B-32'"),
        (ModelConfig(name="x", architecture={"embed_dim": 4}), "model.architecture lacks vision_cfg"),
        (ModelConfig(name="x", architecture=SMALL | {"embed_dim": "wide"}), "does not describe an open_clip model"),
        (small_config(image_size=50), "image_size=50: the patches are 6 pixels wide; give a multiple, such as 48"),
    ],
)
def test_mistakes_are_named(config: ModelConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_model(config)


@pytest.mark.parametrize(
    ("part", "words", "message"),
    [
        ("vision_cfg", {"head_width": 3}, "divisible by num_heads"),
        ("vision_cfg", {"patch_size": 24}, "image tower cannot be used"),
        ("vision_cfg", {"output_tokens": True}, "image tower cannot be used .*not a row of features"),
        ("text_cfg", {"pool_type": "none"}, "text tower cannot be used .*not a row of features"),
        ("text_cfg", {"heads": 5}, "divisible by num_heads"),
    ],
)
def test_a_description_is_tried_when_the_model_is_built(part: str, words: dict[str, Any], message: str) -> None:
    """open_clip checks some of it when the model is first used, and by assertions."""
    described = SMALL | {part: SMALL[part] | words}
    with pytest.raises(UserError, match=f"does not describe an open_clip model.*{message}"):
        build_model(ModelConfig("theirs", described))


def test_a_convolutional_tower_computes_channels_last_and_the_same() -> None:
    """Its parameters keep their layout, and so do checkpoints, FSDP2 and optimizers."""
    vision = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
    model = build_model(ModelConfig("small", SMALL | {"vision_cfg": vision}, image_size=64, batch_norm="frozen"))
    tower = model.image.double()
    torch.manual_seed(0)
    for p in tower.parameters():
        torch.nn.init.normal_(p, std=0.2)
    layouts = []
    last = tower.encoder.layer4[-1]
    last.register_forward_hook(
        lambda _, inputs, out: layouts.append(out.is_contiguous(memory_format=torch.channels_last))
    )
    pixels = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8)
    results = []
    for memory_format in (tower.memory_format, torch.contiguous_format):
        tower.memory_format = memory_format
        tower.zero_grad()
        rows = tower(pixels)
        rows.square().cumsum(1).sum().backward()
        results.append([rows.detach(), *(p.grad for p in tower.parameters())])
    assert layouts == [True, False]
    assert all(p.is_contiguous() for p in tower.parameters())
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)
    assert small_model().image.memory_format == torch.contiguous_format


class BatchNormOfAnotherPackage(_BatchNorm):
    def _check_input_dim(self, x: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize(("setting", "in_training"), [("frozen", []), ("sync", ["encoder.norm"])])
def test_frozen_batch_normalisation_is_all_that_the_cache_refuses_in_chunks(
    setting: str, in_training: list[str]
) -> None:
    model = build_model(small_config(batch_norm=setting))
    model.image.encoder.add_module("norm", BatchNormOfAnotherPackage(4))
    assert [*batch_norms(model.train().image)] == in_training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_are_normalised_in_the_type_of_the_patch_embedding(dtype: torch.dtype) -> None:
    """On a GPU one kernel does it. This compares how it rounds."""
    tower = small_model().image
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    actual = tower.normalised(pixels, dtype)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, tower.encoder_inputs(pixels).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
