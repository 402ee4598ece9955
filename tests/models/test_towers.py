"""The towers give open_clip's features, freeze as asked, and refuse wrong settings clearly."""

from pathlib import Path

import open_clip
import pytest
import torch

from clipscale.config.sections import ModelConfig, TowerConfig
from clipscale.errors import UserError
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


def test_local_weights_are_loaded(tmp_path: Path) -> None:
    torch.manual_seed(1)
    theirs = open_clip.model.CustomTextCLIP(**SMALL, init_logit_scale=1.5)
    torch.save(theirs.state_dict(), tmp_path / "whole.pt")
    torch.save(theirs.visual.state_dict(), tmp_path / "image.pt")
    model = build_model(small(weights=str(tmp_path / "whole.pt")))
    assert torch.equal(model.text.encoder.token_embedding.weight, theirs.text.token_embedding.weight)
    assert model.logit_scale.item() == 1.5
    for name in ("whole.pt", "image.pt"):
        tower = build_model(small(image=TowerConfig(str(tmp_path / name)))).image.encoder
        assert torch.equal(tower.conv1.weight, theirs.visual.conv1.weight)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(name="ViT-B32"), "model.name='ViT-B32' is not an open_clip architecture; did you mean 'ViT-B-32'"),
        (small(weights="nowhere.pt"), "model.weights='nowhere.pt' is no file, no folder, no run and no tag"),
        (ModelConfig(name="x", architecture={"embed_dim": 4}), "model.architecture lacks vision_cfg"),
        (ModelConfig(name="coca_ViT-B-32"), "captioning model"),
    ],
)
def test_mistakes_are_named(config: ModelConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_model(config)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    torch.save(build_model(small()).text.state_dict(), tmp_path / "w.pt")
    with pytest.raises(UserError, match="does not fit this architecture"):
        build_model(small(weights=str(tmp_path / "w.pt")))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no checkpoint", r"is damaged or not a checkpoint \(at position 0"),
        (b"PK\x03\x04 none", r"is damaged or not a checkpoint \(File is not a zip"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "w.pt").write_bytes(data)
    with pytest.raises(UserError, match=rf"^model.weights='.*w.pt' {message}"):
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


def test_normalisation_matches_the_definition() -> None:
    model = build_model(small())
    seen = []
    model.image.encoder.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.image(torch.full((1, 3, 12, 12), 255, dtype=torch.uint8))
    mean, std = torch.tensor(open_clip.OPENAI_DATASET_MEAN), torch.tensor(open_clip.OPENAI_DATASET_STD)
    assert torch.allclose(seen[0][0, :, 0, 0], (1 - mean) / std, atol=1e-5)


@pytest.mark.parametrize(("name", "any_size"), [("ViT-B-32", False), ("RN50", False), ("convnext_base", True)])
def test_towers_with_learned_positions_take_one_size(name: str, any_size: bool) -> None:
    with torch.device("meta"):
        assert build_model(ModelConfig(name=name)).any_size is any_size
