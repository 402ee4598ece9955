"""docs/howto/hugging_face.py: transformers computes the features of the run's model; what goes there comes back."""

import importlib.util
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from clipscale.config.sections import ModelConfig
from clipscale.models.towers import build_model
from clipscale.models.weights import described
from clipscale.tools.export.settings import ExportSettings
from clipscale.tools.export.verb import main
from tests.tools.export.test_open_clip import ARCHITECTURE, saved

transformers = pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")
SCRIPT = Path(__file__).parents[1] / "docs/howto/hugging_face.py"
TEXTS = ["a red ring", "two cats on a chair, and a dog"]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("hugging_face", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def features(tower: Any, **inputs: Tensor) -> Tensor:
    """Unit features by one of transformers' methods."""
    with torch.no_grad():
        output = tower(**inputs)
    return F.normalize(getattr(output, "pooler_output", output), dim=-1)


@pytest.mark.parametrize("kind", ["clip", "quick"])
def test_transformers_loads_what_was_exported_and_computes_the_same(tmp_path: Path, script: Any, kind: str) -> None:
    architecture = ARCHITECTURE | {"quick_gelu": kind == "quick"}
    model = saved(
        tmp_path / "run", ModelConfig("own", architecture, preprocess={"mean": [0.5, 0.4, 0.3]}, init_scale=20.0)
    )
    out = tmp_path / "hf"
    script.main(["to-transformers", str(main(ExportSettings(run=str(tmp_path / "run")))), str(out)])
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


def test_the_tokenizer_of_an_export_is_clips(tmp_path: Path, script: Any) -> None:
    script.write_tokenizer(tmp_path, 12)
    reference = transformers.CLIPTokenizer.from_pretrained(tmp_path)(TEXTS)["input_ids"]
    for ours, tokens in zip(open_clip.SimpleTokenizer(context_length=12)(TEXTS).tolist(), reference):
        assert tokens == ours[: len(tokens)] and not any(ours[len(tokens) :]), f"{tokens} instead of {ours}"


def test_a_model_that_transformers_does_not_have_is_refused(tmp_path: Path, script: Any) -> None:
    saved(tmp_path / "run", ModelConfig("own", ARCHITECTURE, init_bias=-10.0))
    out = main(ExportSettings(run=str(tmp_path / "run")))
    with pytest.raises(ValueError, match=r"a logit bias is not part of CLIP's own architecture"):
        script.main(["to-transformers", str(out), str(tmp_path / "hf")])


def test_a_model_of_transformers_trains_here_and_comes_back(tmp_path: Path, script: Any) -> None:
    torch.manual_seed(3)
    common = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
    text = common | {"max_position_embeddings": 12, "vocab_size": 49408}
    sizes = {"vision_config": common | {"image_size": 32, "patch_size": 8}, "text_config": text, "projection_dim": 32}
    reference = transformers.CLIPModel(transformers.CLIPConfig(**sizes)).eval()
    reference.save_pretrained(tmp_path / "reference")
    folder = tmp_path / "open_clip"
    script.main(["to-open-clip", str(tmp_path / "reference"), str(folder)])
    model = build_model(described(ModelConfig(name="", weights=str(folder)))).eval()
    tokens = model.tokenizer(TEXTS)
    with torch.no_grad():
        ours = model.text(tokens)
    assert torch.allclose(features(reference.get_text_features, input_ids=tokens), ours, atol=1e-5)
    script.main(["to-transformers", str(folder), str(tmp_path / "again")])
    again = transformers.AutoModel.from_pretrained(tmp_path / "again")
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in reference.state_dict().items())
