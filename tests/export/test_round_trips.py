"""A model that goes through clipscale comes back as it was: every weight and every feature, bit for bit."""

from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import open_clip
import pytest
import timm
import torch
import torch.nn.functional as F
from open_clip.model import CLIP, CustomTextCLIP
from open_clip.push_to_hf_hub import save_for_hf
from torch import Tensor, nn

from clipscale import checkpoint
from clipscale.common.errors import UserError
from clipscale.config.sections import ModelConfig, TowerConfig
from clipscale.config.tools import ExportSettings
from clipscale.export.open_clip import check_same, description
from clipscale.export.verb import main
from clipscale.models import huggingface
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights import described
from tests.models.test_weights import SIGLIP, SMALL

REAL = pytest.mark.slow
TEXTS = ["a red ring", "two cats on a chair"]


def tokenizer_in(folder: Path) -> Path:
    """A folder with a small tokenizer of transformers."""
    pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", *["a", "red", "ring", "two", "cats", "on", "chair"]]
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
    return folder


def through_clipscale(folder: Path, config: ModelConfig, to: str, *, hub: bool = False) -> tuple[ClipModel, Path]:
    """A run whose checkpoint holds the model that `config` describes; that model, and the run's export."""
    config = described(config)
    model = build_model(config).eval()
    checkpoint.save(folder, 7, {"model": model.state_dict(), "model_config": asdict(config)}, keep=1)
    return model, main(ExportSettings(run=str(folder), to=to, hub=hub or config.hub))


def inputs(model: ClipModel) -> tuple[Tensor, Tensor]:
    """Normalised pixels and tokens."""
    side, generator = model.image_size, torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (2, 3, side, side), generator=generator, dtype=torch.uint8)
    return (pixels - model.image.mean) / model.image.std, model.tokenizer(TEXTS).long()


def assert_same(found: nn.Module, wanted: nn.Module, names: tuple[str, str], given: tuple[Tensor, Tensor]) -> None:
    """The two encoding methods of two models give equal features."""
    with torch.no_grad():
        for name, rows in zip(names, given):
            one, other = (getattr(model.eval(), name)(rows) for model in (found, wanted))
            one, other = (getattr(features, "pooler_output", features) for features in (one, other))
            assert torch.equal(one, other), f"{name}: {(one - other).abs().max()}"


def custom(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's weights under the names of its CustomTextCLIP."""
    alone = ("visual.", "text.", "logit_")
    return {name if name.startswith(alone) else f"text.{name}": value for name, value in state.items()}


@pytest.mark.parametrize("name", ["small", pytest.param("ViT-B-32", marks=REAL)])
def test_open_clips_model_comes_back(tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    architecture = open_clip.get_model_config(name) or SMALL
    theirs = CLIP(**architecture)
    open_clip.model.set_model_preprocess_cfg(theirs, open_clip.transform.PreprocessCfg().__dict__)
    nothing = SimpleNamespace(save_pretrained=lambda folder: None)  # open_clip's own tokenizer has no files
    save_for_hf(theirs, nothing, architecture, str(tmp_path / "theirs"))
    config = ModelConfig(name="", weights=str(tmp_path / "theirs"))
    ours, out = through_clipscale(tmp_path / "run", config, "open_clip")
    again, _ = open_clip.create_model_from_pretrained(f"local-dir:{out}")
    assert_same(again, theirs, ("encode_image", "encode_text"), inputs(ours))
    first, second = custom(theirs.state_dict()), custom(again.state_dict())
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("name", ["small", pytest.param("ViT-B-16-SigLIP", marks=REAL)])
def test_open_clips_siglip_comes_back_with_its_tokenizer(tmp_path: Path, name: str) -> None:
    torch.manual_seed(2)
    architecture = deepcopy(open_clip.get_model_config(name) or SIGLIP | {"custom_text": True})
    length = architecture["text_cfg"].setdefault("context_length", 12)
    architecture["text_cfg"]["hf_tokenizer_name"] = "timm/ViT-B-16-SigLIP"
    tokenizer = open_clip.tokenizer.HFTokenizer(str(tokenizer_in(tmp_path / "words")), length)
    theirs = CustomTextCLIP(**{key: value for key, value in architecture.items() if key != "custom_text"})
    open_clip.model.set_model_preprocess_cfg(theirs, open_clip.transform.PreprocessCfg(mean=(0.5,) * 3).__dict__)
    save_for_hf(theirs, tokenizer, architecture, str(tmp_path / "theirs"))
    config = ModelConfig(name="", weights=str(tmp_path / "theirs"))
    ours, out = through_clipscale(tmp_path / "run", config, "open_clip")
    again, _ = open_clip.create_model_from_pretrained(f"local-dir:{out}")
    assert torch.equal(open_clip.get_tokenizer(f"local-dir:{out}")(TEXTS), tokenizer(TEXTS))
    assert torch.equal(ours.tokenizer(TEXTS), tokenizer(TEXTS))
    assert_same(again, theirs, ("encode_image", "encode_text"), inputs(ours))
    assert again.logit_bias.item() == theirs.logit_bias.item()


@pytest.mark.parametrize(
    "size", ["small", pytest.param("real", marks=REAL), pytest.param("real, of 240 pixels", marks=REAL)]
)
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_hugging_faces_model_comes_back(tmp_path: Path, kind: str, size: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")
    torch.manual_seed(3)
    sizes: dict[str, Any] = {}
    if size == "small":
        common = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
        text = common | {"max_position_embeddings": 12, "vocab_size": 49408}
        sizes = {"vision_config": common | {"image_size": 32, "patch_size": 8}, "text_config": text}
        sizes["projection_dim"] = 32
    elif "240" in size:
        sizes = {"vision_config": {"image_size": 240, "patch_size": 16}}
    if kind == "clip":
        theirs = transformers.CLIPModel(transformers.CLIPConfig(**sizes))
    else:
        theirs = transformers.SiglipModel(transformers.SiglipConfig(**sizes))
    folder = tmp_path / "theirs"
    theirs.save_pretrained(folder)
    config = ModelConfig(name="", weights=str(folder))
    if kind == "siglip":
        tokenizer_in(folder)
    if (kind, size) == ("siglip", "small"):  # timm has no such tower by name
        config = ModelConfig("small siglip", SIGLIP, weights=str(folder / "model.safetensors"))
    ours, out = through_clipscale(tmp_path / "run", config, "hf")
    again = transformers.AutoModel.from_pretrained(out)
    assert type(again) is type(theirs)
    assert_same(again, theirs, ("get_image_features", "get_text_features"), inputs(ours))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize("size", ["small", pytest.param("real", marks=REAL)])
def test_towers_of_timm_and_hugging_face_come_back_in_open_clips_folder(tmp_path: Path, size: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")
    torch.manual_seed(4)
    name = f"vit_{'tiny' if size == 'small' else 'base'}_patch16_224"
    image = timm.create_model(name, num_classes=0).eval()
    timm.models.save_for_hf(image, str(tmp_path / "image"))
    values = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 0}
    if size == "small":
        values |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    text = transformers.RobertaModel(transformers.RobertaConfig(**values), add_pooling_layer=False).eval()
    folder = tokenizer_in(tmp_path / "text")
    text.save_pretrained(folder)
    architecture = {
        "embed_dim": 24,
        "vision_cfg": {"image_size": 224, "timm_model_name": name, "timm_pool": "token", "timm_proj": "linear"},
        "text_cfg": {"hf_model_name": str(folder), "hf_tokenizer_name": str(folder), "hf_pooler_type": "mean_pooler"}
        | {"hf_proj_type": "mlp", "context_length": 12},
    }
    towers = {"image": TowerConfig(str(tmp_path / "image")), "text": TowerConfig(str(folder))}
    config = ModelConfig("towers", architecture, hub=True, **towers)  # type: ignore[arg-type]
    ours, out = through_clipscale(tmp_path / "run", config, "open_clip", hub=True)
    pixels, tokens = inputs(ours)
    with torch.no_grad():
        assert torch.equal(ours.image.encoder.trunk(pixels), image(pixels))
        mask = (tokens != 0).long()
        found = [tower(input_ids=tokens, attention_mask=mask) for tower in (ours.text.encoder.transformer, text)]
        assert torch.equal(found[0].last_hidden_state, found[1].last_hidden_state)
        again, _ = open_clip.create_model_from_pretrained(f"local-dir:{out}")
        again.eval()
        for rows, wanted, encode in (
            (pixels, ours.image.encoder, again.encode_image),
            (tokens, ours.text.encoder, again.encode_text),
        ):
            assert torch.equal(encode(rows, normalize=True), F.normalize(wanted(rows), dim=-1))


VISION = {
    "image_size": 224,
    "timm_model_name": "vit_base_patch16_siglip_224",
    "timm_pool": "map",
    "timm_proj": "linear",
}


@pytest.mark.parametrize(
    ("vision", "side", "refused"),
    [
        (VISION, 256, ""),
        (
            VISION,
            240,
            r"a trunk\.pos_embed of \[1, 196, 768\], and model\.image_size=240 has made it \[1, 225, 768\]; take",
        ),
        (VISION | {"act_kwargs": {"approximate": "none"}}, None, ""),
        (VISION | {"act_kwargs": {"approximate": "tanh"}}, None, "another GELU than Hugging Face.*; take to=hf"),
    ],
)
def test_a_tower_of_timm_that_open_clip_builds_otherwise_is_refused(
    vision: dict[str, Any], side: int | None, refused: str
) -> None:
    config = ModelConfig("own", SMALL | {"vision_cfg": vision}, image_size=side)
    with torch.device("meta"):
        model = build_model(config)
    found = description(model, config)["model_cfg"]
    if not refused:
        check_same(model, found, config)
        assert found["vision_cfg"]["timm_model_name"] == f"vit_base_patch16_siglip_{side or 224}"
        return
    with pytest.raises(UserError, match=f"to=open_clip: open_clip builds vit_base_patch16_siglip_224 with {refused}"):
        check_same(model, found, config)


def test_hugging_faces_siglip_of_a_resolution_that_timm_does_not_name() -> None:
    found = huggingface.description({"model_type": "siglip", "vision_config": {"image_size": 240}}, "folder")
    assert found["vision_cfg"]["timm_model_name"] == "vit_base_patch16_siglip_224"
    assert huggingface.resolution(found) == {"image_size": 240}
    named = huggingface.description({"model_type": "siglip", "vision_config": {"image_size": 256}}, "folder")
    assert named["vision_cfg"]["timm_model_name"].endswith("256") and huggingface.resolution(named) == {}
    assert huggingface.resolution(huggingface.description({"model_type": "clip"}, "folder")) == {}


@pytest.mark.parametrize(
    ("text", "bias", "message"),
    [
        ({"hf_model_name": "roberta-base"}, False, "its text tower is roberta-base"),
        (SMALL["text_cfg"], False, "only timm's SigLIP towers with SigLIP's text tower and a logit bias"),
        (SIGLIP["text_cfg"], True, "only timm's SigLIP towers with SigLIP's text tower and a logit bias"),
    ],
)
def test_towers_that_transformers_does_not_unite_are_refused(text: dict[str, Any], bias: bool, message: str) -> None:
    convnext = SimpleNamespace(trunk=SimpleNamespace(stages=()))
    described_so = SMALL | {"vision_cfg": {"timm_model_name": "convnext_tiny", "image_size": 224}, "text_cfg": text}
    with pytest.raises(ValueError, match=message):
        huggingface.configuration(described_so, convnext, logit_bias=bias)
