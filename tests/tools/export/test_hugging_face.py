"""transformers computes the features of the run's model; a model that goes through clipscale comes back bit for bit."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from clipscale.common.errors import UserError
from clipscale.config.sections import ModelConfig
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights import described
from clipscale.tools.export.hugging_face import write_tokenizer
from clipscale.tools.export.settings import ExportSettings
from clipscale.tools.export.verb import main
from tests.models.test_weights import SMALL
from tests.support.checkpoints import save
from tests.tools.export.test_open_clip import ARCHITECTURE, saved

transformers = pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")
TEXTS = ["a red ring", "two cats on a chair, and a dog"]


def features(tower: Any, **inputs: Tensor) -> Tensor:
    """Unit features by one of transformers' methods."""
    with torch.no_grad():
        output = tower(**inputs)
    return F.normalize(getattr(output, "pooler_output", output), dim=-1)


@pytest.mark.parametrize("kind", ["clip", "quick"])
def test_transformers_loads_what_was_exported_and_computes_the_same(tmp_path: Path, kind: str) -> None:
    architecture: dict[str, Any] = ARCHITECTURE | {"quick_gelu": kind == "quick"}
    model = saved(
        tmp_path / "run", ModelConfig("own", architecture, preprocess={"mean": [0.5, 0.4, 0.3]}, init_scale=20.0)
    )
    out = main(ExportSettings(run=str(tmp_path / "run"), to="hf"))
    reference = transformers.AutoModel.from_pretrained(out).eval()
    pixels = torch.randint(0, 256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    tokens = model.tokenizer(TEXTS)
    with torch.no_grad():
        image, text = model.image(pixels), model.text(tokens)
    normalised = (pixels - model.image.mean) / model.image.std
    assert torch.allclose(features(reference.get_image_features, pixel_values=normalised), image, atol=1e-5)
    assert torch.allclose(features(reference.get_text_features, input_ids=tokens), text, atol=1e-5)
    assert reference.logit_scale.item() == pytest.approx(model.logit_scale.item())
    if kind == "clip":
        processor = transformers.AutoImageProcessor.from_pretrained(out, use_fast=False)
        picture = Image.effect_noise((50, 40), 60).convert("RGB")
        picture.save(tmp_path / "a.png")
        ours = torch.from_numpy(model.eval_transform()((tmp_path / "a.png").read_bytes()))
        processed = torch.as_tensor(processor(picture, return_tensors="pt")["pixel_values"][0])
        assert torch.allclose(processed, (ours - model.image.mean) / model.image.std, atol=1.1 / 255 / 0.26)


def test_the_tokenizer_of_an_export_is_clips(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 12)
    reference = transformers.CLIPTokenizer.from_pretrained(tmp_path)(TEXTS)["input_ids"]
    for ours, tokens in zip(open_clip.SimpleTokenizer(context_length=12)(TEXTS).tolist(), reference):
        assert tokens == ours[: len(tokens)] and not any(ours[len(tokens) :]), f"{tokens} instead of {ours}"


def test_a_model_that_transformers_does_not_have_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "run", ModelConfig("own", ARCHITECTURE, init_bias=-10.0))
    with pytest.raises(UserError, match=r"to=hf: .*no such CLIP .*a logit bias.*take to=open_clip"):
        main(ExportSettings(run=str(tmp_path / "run"), to="hf"))


def through_clipscale(folder: Path, config: ModelConfig, to: str) -> tuple[ClipModel, Path]:
    """A run whose checkpoint holds the model that `config` describes; that model, and the run's export."""
    config = described(config)
    model = build_model(config).eval()
    save(folder, 7, {"model": model.state_dict(), "model_config": asdict(config)}, keep=1)
    return model, main(ExportSettings(run=str(folder), to=to))


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    state = other.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_hugging_faces_model_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(3)
    common = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
    text = common | {"max_position_embeddings": 12, "vocab_size": 49408}
    sizes = {"vision_config": common | {"image_size": 32, "patch_size": 8}, "text_config": text, "projection_dim": 32}
    reference = transformers.CLIPModel(transformers.CLIPConfig(**sizes))
    reference.save_pretrained(tmp_path / "reference")
    config = ModelConfig(name="", weights=str(tmp_path / "reference"))
    _, out = through_clipscale(tmp_path / "run", config, "hf")
    again = transformers.AutoModel.from_pretrained(out)
    assert type(again) is type(reference)
    assert_same_weights(reference, again)


def test_open_clips_model_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(1)
    reference = open_clip.model.CustomTextCLIP(**SMALL)
    torch.save(reference.state_dict(), tmp_path / "reference.pt")
    config = ModelConfig("small", SMALL, weights=str(tmp_path / "reference.pt"))
    _, out = through_clipscale(tmp_path / "run", config, "open_clip")
    assert_same_weights(reference, open_clip.create_model_from_pretrained(f"local-dir:{out}")[0])
