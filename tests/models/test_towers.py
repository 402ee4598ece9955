"""The towers give open_clip's features, freeze as asked, and refuse wrong settings clearly."""

from pathlib import Path

import open_clip
import pytest
import torch

from clipscale.common.errors import UserError
from clipscale.config.sections import ModelConfig
from clipscale.models.towers import Flops, build_model, forward_flops

SMALL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 12, "layers": 2, "width": 32, "head_width": 16, "patch_size": 6},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


def small(**settings: object) -> ModelConfig:
    return ModelConfig(name="small", architecture=SMALL, **settings)  # type: ignore[arg-type]


def test_features_are_open_clips_on_the_same_pixels() -> None:
    torch.manual_seed(0)
    model = build_model(small()).eval()
    theirs = open_clip.model.CustomTextCLIP(**SMALL).eval()
    theirs.visual.load_state_dict(model.image.encoder.state_dict())
    theirs.text.load_state_dict(model.text.encoder.state_dict())
    pixels = torch.randint(0, 256, (5, 3, 12, 12), dtype=torch.uint8)
    tokens = model.tokenizer(["a red square", "two circles", "", "x " * 50, "déjà vu"])
    from torchvision.transforms.functional import normalize

    normal = torch.stack(
        [normalize(p.float() / 255, open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD) for p in pixels]
    )
    assert torch.allclose(model.image(pixels), theirs.encode_image(normal, normalize=True), atol=1e-5)
    assert torch.allclose(model.text(tokens.to(torch.int32)), theirs.encode_text(tokens, normalize=True), atol=1e-6)


def test_rows_are_unit_length_in_float32_under_autocast() -> None:
    model = build_model(small())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        u = model.image(torch.randint(0, 256, (5, 3, 12, 12), dtype=torch.uint8))
    assert u.dtype == torch.float32
    assert torch.allclose(u.norm(dim=1), torch.ones(5), atol=1e-6)


def test_frozen_towers_take_no_gradient_and_stay_in_evaluation_mode() -> None:
    model = build_model(small(freeze_image=True)).train()
    assert not any(p.requires_grad for p in model.image.parameters())
    assert not model.image.encoder.training
    assert model.text.encoder.training
    assert all(p.requires_grad for p in model.text.parameters())


def test_scale_and_bias_start_as_asked() -> None:
    assert build_model(small()).logit_scale.exp().item() == pytest.approx(1 / 0.07)
    assert build_model(small()).logit_bias is None
    model = build_model(small(init_scale=10.0, init_bias=-10.0))
    assert model.logit_scale.exp().item() == pytest.approx(10.0)
    assert model.logit_bias is not None
    assert model.logit_bias.item() == -10.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(name="ViT-B32"), "model.name='ViT-B32' is not an open_clip architecture; did you mean 'ViT-B-32'"),
        (ModelConfig(name="x", architecture={"embed_dim": 4}), "model.architecture lacks vision_cfg"),
        (ModelConfig(name="coca_ViT-B-32"), "captioning model"),
    ],
)
def test_mistakes_are_named(config: ModelConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_model(config)


@pytest.mark.parametrize("data", [b"no checkpoint", b"PK\x03\x04 none"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "w.pt").write_bytes(data)
    with pytest.raises(UserError, match=r"^model.weights='.*w.pt' is damaged or not a checkpoint"):
        build_model(small(weights=str(tmp_path / "w.pt")))


def test_flops_are_the_published_ones() -> None:
    """OpenCLIP's model profile gives 4.41 and 2.98 GMACs for the towers of ViT-B/32: twice that in FLOPs."""
    image, text = forward_flops(ModelConfig(name="ViT-B-32"))
    assert image / 2e9 == pytest.approx(4.41, rel=0.02)
    assert text / 2e9 == pytest.approx(2.98, rel=0.02)


def test_a_frozen_tower_counts_its_forward_only() -> None:
    cpu = torch.device("cpu")
    plain, frozen = Flops(small(), cpu), Flops(small(freeze_image=True), cpu)
    assert plain.per_sample - frozen.per_sample == 2 * forward_flops(small())[0]
    assert plain.utilisation(100.0) is None, "a CPU's peak is not known"


@pytest.mark.parametrize(("name", "any_size"), [("ViT-B-32", False), ("RN50", False), ("convnext_base", True)])
def test_towers_with_learned_positions_take_one_size(name: str, any_size: bool) -> None:
    with torch.device("meta"):
        assert build_model(ModelConfig(name=name)).any_size is any_size
