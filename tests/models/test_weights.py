"""Weights of every source give the features of the model they come from; those that do not fit are listed and refused."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
import torch.nn.functional as F
from huggingface_hub.utils.logging import get_verbosity
from safetensors.torch import save_file
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.config.sections import ModelConfig, TowerConfig
from clipscale.models import huggingface, weights
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights import described, described_for_training, find

SMALL: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 16, "layers": 2},
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
PIXELS = torch.randint(0, 256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
TOKENS = open_clip.SimpleTokenizer(context_length=12)(["a red ring", "two cats on a chair"])


def config(**values: Any) -> ModelConfig:
    return ModelConfig(**({"name": "small", "architecture": SMALL} | values))


def features(model: ClipModel, pixels: Tensor = PIXELS, tokens: Tensor = TOKENS) -> tuple[Tensor, Tensor]:
    model.eval()
    with torch.no_grad():
        return model.image(pixels), model.text(tokens)


def random_model(seed: int, **values: Any) -> ClipModel:
    torch.manual_seed(seed)
    return build_model(config(**values))


def state_of(model: ClipModel) -> dict[str, Tensor]:
    """open_clip's names of the weights."""
    state = {f"visual.{name}": value for name, value in model.image.encoder.state_dict().items()}
    state |= {f"text.{name}": value for name, value in model.text.encoder.state_dict().items()}
    return state | {"logit_scale": model.logit_scale.detach()}


def run(folder: Path, model: ClipModel) -> Path:
    saved = {"model": model.state_dict(), "model_config": asdict(config())}
    checkpoint.save(folder, 3, saved, keep=1)
    return folder


def plain(folder: Path, model: ClipModel) -> Path:
    """open_clip's older layout, wrapped as its trainer does."""
    state = {n.removeprefix("text."): v for n, v in state_of(model).items()}
    torch.save({"epoch": 3, "state_dict": {f"module.{n}": v for n, v in state.items()}}, folder / "w.pt")
    return folder / "w.pt"


def custom(folder: Path, model: ClipModel) -> Path:
    save_file({n: v.contiguous() for n, v in state_of(model).items()}, folder / "w.safetensors")
    return folder / "w.safetensors"


def open_clip_folder(folder: Path, model: ClipModel, architecture: dict[str, Any] = SMALL) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({n: v.contiguous() for n, v in state_of(model).items()}, folder / "open_clip_model.safetensors")
    pixels = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "interpolation": "bilinear", "resize_mode": "squash"}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": architecture, "preprocess_cfg": pixels}))
    return folder


@pytest.mark.parametrize("write", [run, plain, custom, open_clip_folder])
def test_weights_of_every_layout_give_the_same_features(
    tmp_path: Path, write: Callable[[Path, ClipModel], Path]
) -> None:
    theirs = random_model(1)
    found = build_model(config(weights=str(write(tmp_path, theirs))))
    for ours, wanted in zip(features(found), features(theirs)):
        assert torch.equal(ours, wanted)


def test_the_weights_of_a_run_are_found_by_its_checkpoint_and_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = random_model(1)
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "runs/mine", theirs)
    for name in ("mine", "runs/mine", "runs/mine/checkpoints/step_00000003"):
        assert torch.equal(features(build_model(config(weights=name)))[1], features(theirs)[1])


def test_a_folder_describes_its_model_and_how_its_pictures_are_prepared(tmp_path: Path) -> None:
    theirs = random_model(1)
    found = described(ModelConfig(name="", weights=str(open_clip_folder(tmp_path, theirs)), std=(0.1, 0.1, 0.1)))
    assert found.architecture == SMALL and found.mean == (0.5, 0.5, 0.5) and found.std == (0.1, 0.1, 0.1)
    assert (found.resize, found.interpolation) == ("squash", "bilinear")
    assert torch.equal(features(build_model(found))[1], features(theirs)[1])
    (tmp_path / "file").mkdir()
    with pytest.raises(UserError, match="does not describe its architecture; give a preset"):
        described(ModelConfig(name="", weights=str(custom(tmp_path / "file", theirs))))


def test_training_takes_the_mean_and_deviation_of_the_weights_of_the_image_tower(tmp_path: Path) -> None:
    half, folder = (0.5, 0.5, 0.5), str(open_clip_folder(tmp_path / "a", random_model(1)))
    (tmp_path / "b").mkdir()
    bare = str(custom(tmp_path / "b", random_model(1)))
    for start in (
        config(weights=folder),
        config(weights=bare, image=TowerConfig(folder)),
        config(image=TowerConfig(folder)),
    ):
        for found in (described_for_training(start, None), described(start)):
            assert (found.mean, found.std, found.resize) == (half, half, "squash")
    for start in (config(weights=bare), config(text=TowerConfig(folder)), config()):
        assert described_for_training(start, None) == start
    with pytest.raises(UserError, match=r"model\.std=\[0\.1.*was trained with \[0\.5.*leave model\.std unset"):
        described_for_training(config(weights=folder, std=(0.1, 0.1, 0.1)), None)


def test_a_checkpoint_keeps_its_mean_and_deviation_whatever_the_weights_say(tmp_path: Path) -> None:
    folder = str(open_clip_folder(tmp_path, random_model(1)))
    old = {"model_config": {name: value for name, value in asdict(config()).items() if name not in ("resize", "mean")}}
    assert described_for_training(config(weights=folder), old).mean == ModelConfig().mean
    saved = {"model_config": asdict(config(mean=(0.5, 0.5, 0.5)))}
    assert described_for_training(config(), saved).mean == (0.5, 0.5, 0.5)
    with pytest.raises(UserError, match=r"model\.mean=\[0\.1.*the checkpoint was trained with \[0\.5"):
        described_for_training(config(mean=(0.1, 0.1, 0.1)), saved)


def test_training_takes_no_side_of_pictures_that_a_resumed_run_would_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face's description of a timm tower of another size names its side."""
    known = {"mean": (0.5, 0.5, 0.5), "image_size": 48}
    monkeypatch.setattr(weights, "find", lambda *_: weights.Source("model.weights='w'", tmp_path, {"a": 1}, known))
    begun = described_for_training(config(weights="w"), None)
    assert begun.mean == (0.5, 0.5, 0.5) and begun.image_size == config().image_size
    assert described_for_training(config(weights="w"), {"model_config": asdict(begun)}) == begun
    assert described(config(weights="w")).image_size == 48


@pytest.mark.parametrize("of", ["timm", "transformers"])
def test_a_tower_alone_says_how_its_pictures_are_normalised(tmp_path: Path, of: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    if of == "timm":
        described_as = {"architecture": "vit_tiny", "pretrained_cfg": {"mean": [0.4] * 3, "std": [0.5] * 3}}
    else:
        described_as = {"model_type": "vit"}
        (tmp_path / "preprocessor_config.json").write_text(
            json.dumps({"image_mean": [0.4] * 3, "image_std": [0.5] * 3})
        )
    (tmp_path / "config.json").write_text(json.dumps(described_as))
    found = described_for_training(config(image=TowerConfig(str(tmp_path))), None)
    assert (found.mean, found.std) == ((0.4,) * 3, (0.5,) * 3)


def test_each_tower_has_weights_of_its_own(tmp_path: Path) -> None:
    one, two = random_model(1), random_model(2)
    (tmp_path / "two").mkdir()
    first, second = custom(tmp_path, one), plain(tmp_path / "two", two)
    torch.save(one.image.encoder.state_dict(), tmp_path / "image.pt")
    for image in (first, tmp_path / "image.pt"):
        found = build_model(config(image=TowerConfig(str(image)), text=TowerConfig(str(second))))
        assert torch.equal(features(found)[0], features(one)[0]) and torch.equal(features(found)[1], features(two)[1])


# -- position embeddings, and weights that do not fit -----------------------------------------------------------------------


def test_positions_are_resized_with_a_notice_for_another_resolution(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = random_model(1)
    weights = str(custom(tmp_path, theirs))
    found = build_model(config(weights=weights, image_size=48))
    assert found.image_size == 48 and found.image.encoder.positional_embedding.shape == (37, 32)
    assert "resized from 17 to 37 positions" in caplog.text
    grid = theirs.image.encoder.positional_embedding[1:].reshape(1, 4, 4, 32).permute(0, 3, 1, 2)
    wanted = F.interpolate(grid, size=(6, 6), mode="bicubic", antialias=True).permute(0, 2, 3, 1).reshape(36, 32)
    assert torch.equal(found.image.encoder.positional_embedding[1:], wanted)
    assert features(found, PIXELS.repeat(1, 1, 2, 2)[:, :, :48, :48])[0].isfinite().all()
    with pytest.raises(UserError, match="image_size=50: the patches are 8 pixels wide; give a multiple, such as 48"):
        build_model(config(image_size=50))


def test_weights_that_do_not_fit_are_listed_and_refused_unless_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of(random_model(1))
    del state["visual.ln_post.bias"]
    state["visual.extra"] = torch.zeros(1)
    state["text.text_projection"] = torch.zeros(32, 8)
    torch.save(state, tmp_path / "w.pt")
    weights = str(tmp_path / "w.pt")
    lists = r"missing: visual.ln_post.bias; left over: visual.extra; of another shape: text.text_projection \[32, 8\], not \[32, 16\]"
    with pytest.raises(UserError, match=rf"does not fit this architecture \({lists}\); .*model.allow_mismatch=true"):
        build_model(config(weights=weights))
    torch.manual_seed(1)
    found = build_model(config(weights=weights, allow_mismatch=True))
    assert "left over: visual.extra" in caplog.text
    assert torch.equal(found.image.encoder.conv1.weight, state["visual.conv1.weight"])
    save_file({"conv.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    for allowed in (False, True):
        with pytest.raises(UserError, match="does not fit this architecture"):
            build_model(config(weights=str(tmp_path / "other.safetensors"), allow_mismatch=allowed))


def test_a_bare_tower_may_lack_our_projection_and_have_a_classifier(tmp_path: Path) -> None:
    vision = {"image_size": 224, "timm_model_name": "vit_tiny_patch16_224", "timm_pool": "token", "timm_proj": "linear"}
    torch.manual_seed(3)
    tower = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    save_file({n: v.contiguous() for n, v in tower.state_dict().items()}, tmp_path / "w.safetensors")
    made = config(architecture=SMALL | {"vision_cfg": vision}, image=TowerConfig(str(tmp_path / "w.safetensors")))
    trunk = build_model(made).image.encoder.trunk
    assert torch.equal(trunk.blocks[0].attn.qkv.weight, tower.blocks[0].attn.qkv.weight)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            "nowhere",
            r"model.weights='nowhere' is no file, no folder, no run and no tag of model.name=ViT-B-32.*laion2b_s34b_b79k",
        ),
        ("laion2b_s34b_b79", "did you mean 'laion2b_s34b_b79k'"),
        (
            "laion2b_s34b_b79k",
            "cannot be fetched .*download https://huggingface.co/laion/CLIP-ViT-B-32-laion2B-s34B-b79K elsewhere, and give the file",
        ),
        (
            "hf-hub:laion/none",
            "cannot be fetched .*download https://huggingface.co/laion/none elsewhere, and give its folder",
        ),
    ],
)
def test_names_that_lead_nowhere(
    weights: str, message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def offline(*_: object, **__: object) -> str:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    monkeypatch.setattr("open_clip.download_pretrained", offline)
    before = get_verbosity()
    with pytest.raises(UserError, match=message):
        find(weights, "ViT-B-32")
    assert not caplog.messages, "one line, not one for each attempt"
    assert get_verbosity() == before


def test_a_tag_trained_with_another_activation_names_the_architecture_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("open_clip.download_pretrained", lambda _: "nowhere")
    assert find("openai", "ViT-B-32").quick_gelu and not find("laion2b_s34b_b79k", "ViT-B-32").quick_gelu
    webli = find("webli", "ViT-B-16-SigLIP").pixels
    assert webli["resize"] == "squash" and webli["mean"] == (0.5, 0.5, 0.5)


# -- Hugging Face -----------------------------------------------------------------------------------------------------------


@register_model
def vit_clipscale_siglip_test(**kwargs: Any) -> VisionTransformer:
    """A tower of SigLIP's kind, so small that tests are quick."""
    for name in ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        kwargs.pop(name, None)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return VisionTransformer(**sizes, class_token=False, act_layer="gelu_tanh", **kwargs)


SIGLIP = {
    "embed_dim": 32,
    "vision_cfg": {
        "image_size": 32,
        "timm_model_name": "vit_clipscale_siglip_test",
        "timm_pool": "map",
        "timm_proj": "none",
    },
    "text_cfg": SMALL["text_cfg"]
    | {"no_causal_mask": True, "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}}
    | {"act_kwargs": {"approximate": "tanh"}},
    "init_logit_bias": -10,
}


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_names_of_hugging_face_lead_back(kind: str) -> None:
    model = random_model(1, architecture=SMALL if kind == "clip" else SIGLIP)
    state = state_of(model) | ({} if kind == "clip" else {"logit_bias": torch.tensor(-10.0)})
    theirs = huggingface.from_open_clip(state, kind)
    assert not any("visual." in name or "resblocks" in name for name in theirs)
    other = {"decoder.self_attn.q_proj.weight": torch.zeros(1)}
    back = huggingface.to_open_clip(theirs | other)
    assert back.pop(*other) == 0, "a name that is not known stays"
    assert set(back) == set(state)
    for name, value in back.items():
        assert torch.equal(value.reshape(state[name].shape), state[name]), name


@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
def test_hugging_faces_clip_gives_its_own_features(tmp_path: Path, act: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")
    torch.manual_seed(4)
    common = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_act": act}
    theirs = transformers.CLIPModel(
        transformers.CLIPConfig(
            vision_config=common | {"hidden_size": 32, "image_size": 32, "patch_size": 8},
            text_config=common
            | {"hidden_size": 32, "max_position_embeddings": 12, "vocab_size": 49408, "eos_token_id": 49407},
            projection_dim=16,
        )
    ).eval()
    theirs.save_pretrained(tmp_path)
    agree(theirs, build_model(described(ModelConfig(name="", weights=str(tmp_path)))))


def agree(theirs: Any, ours: ClipModel) -> None:
    """The features of a model of transformers and of ours are the same."""
    pixels = (PIXELS - ours.image.mean) / ours.image.std
    image, text = features(ours)
    with torch.no_grad():
        for name, found, wanted in (
            ("image", image, theirs.get_image_features(pixel_values=pixels)),
            ("text", text, theirs.get_text_features(input_ids=TOKENS)),
        ):
            wanted = F.normalize(getattr(wanted, "pooler_output", wanted), dim=-1)
            worst = float((found - wanted).abs().max())
            assert worst < 1e-5, f"{name} features differ by {worst:.2e}"


def test_hugging_faces_siglip_gives_its_own_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")
    torch.manual_seed(5)
    common = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
    theirs = transformers.SiglipModel(
        transformers.SiglipConfig(
            vision_config=common | {"image_size": 32, "patch_size": 8},
            text_config=common | {"max_position_embeddings": 12, "vocab_size": 49408, "projection_size": 32},
        )
    ).eval()
    theirs.save_pretrained(tmp_path)
    half = (0.5, 0.5, 0.5)
    made = ModelConfig("small siglip", SIGLIP, weights=str(tmp_path / "model.safetensors"), mean=half, std=half)
    agree(theirs, build_model(made))
    read = huggingface.description(json.loads((tmp_path / "config.json").read_text()) | {"vision_config": {}}, "folder")
    assert read["vision_cfg"]["timm_model_name"] == "vit_base_patch16_siglip_224"
    assert read["text_cfg"]["no_causal_mask"] and read["embed_dim"] == 768


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its model_type is 'blip'"):
        huggingface.description({"model_type": "blip"}, "folder")
    (tmp_path / "config.json").write_text("{")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="its configuration cannot be used"):
        find(str(tmp_path), "ViT-B-32")
