"""transformers, ONNX Runtime and torch.export compute the features of the run's model, and every export has a model card."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from clipscale.common.errors import UserError
from clipscale.config.sections import ModelConfig
from clipscale.config.tools import ExportSettings
from clipscale.export import graphs
from clipscale.export.hugging_face import write_tokenizer
from clipscale.export.verb import main
from clipscale.models.towers import ClipModel
from tests.export.test_open_clip import ARCHITECTURE, saved
from tests.models.test_weights import SIGLIP

TEXTS = ["a red ring", "two cats on a chair, and a dog"]


def features(model: ClipModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pixels, tokens, and the unit features of both."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (2, 3, 32, 32), generator=generator, dtype=torch.uint8)
    tokens = model.tokenizer(TEXTS)
    with torch.no_grad():
        return pixels, tokens, model.image(pixels), model.text(tokens)


@pytest.mark.parametrize("kind", ["clip", "quick", "siglip"])
def test_transformers_loads_what_was_exported_and_computes_the_same(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")
    architecture: dict[str, Any] = SIGLIP if kind == "siglip" else ARCHITECTURE | {"quick_gelu": kind == "quick"}
    model = saved(tmp_path / "run", ModelConfig("own", architecture, mean=(0.5, 0.4, 0.3), init_scale=20.0))
    out = main(ExportSettings(run=str(tmp_path / "run"), to="hf"))
    theirs = transformers.AutoModel.from_pretrained(out).eval()
    pixels, tokens, image, text = features(model)
    with torch.no_grad():
        for found, wanted in (
            (theirs.get_image_features(pixel_values=(pixels - model.image.mean) / model.image.std), image),
            (theirs.get_text_features(input_ids=tokens), text),
        ):
            worst = float((F.normalize(getattr(found, "pooler_output", found), dim=-1) - wanted).abs().max())
            assert worst < 1e-5, f"features differ by {worst:.2e}"
    assert theirs.logit_scale.item() == pytest.approx(model.logit_scale.item())
    if kind == "clip":
        processor = transformers.AutoImageProcessor.from_pretrained(out, use_fast=False)
        picture = Image.effect_noise((50, 40), 60).convert("RGB")
        picture.save(tmp_path / "a.png")
        ours = torch.from_numpy(model.eval_transform()((tmp_path / "a.png").read_bytes()))
        ours = (ours - model.image.mean) / model.image.std
        found = torch.as_tensor(processor(picture, return_tensors="pt")["pixel_values"][0])
        assert float((found - ours).abs().max()) < 1e-4 + 1.01 / 255 / min(0.26, 0.27)


def test_the_tokenizer_of_an_export_is_clips(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")
    write_tokenizer(tmp_path, 12)
    theirs = transformers.CLIPTokenizer.from_pretrained(tmp_path)(TEXTS)["input_ids"]
    import open_clip

    for found, wanted in zip(theirs, open_clip.SimpleTokenizer(context_length=12)(TEXTS).tolist()):
        assert found == wanted[: len(found)] and not any(wanted[len(found) :]), f"{found} instead of {wanted}"


@pytest.mark.parametrize(("bias", "image"), [(-10.0, "vit"), (None, "resnet")])
def test_a_model_that_transformers_does_not_have_is_refused(tmp_path: Path, bias: float | None, image: str) -> None:
    architecture = ARCHITECTURE
    if image == "resnet":
        vision = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16}
        architecture = ARCHITECTURE | {"vision_cfg": vision}
    saved(tmp_path / "run", ModelConfig("own", architecture, init_bias=bias))
    with pytest.raises(UserError, match=r"to=hf: .*no such CLIP or SigLIP .*take to=open_clip"):
        main(ExportSettings(run=str(tmp_path / "run"), to="hf"))


@pytest.mark.slow  # torch.export traces both towers
def test_torchs_programs_compute_the_same(tmp_path: Path) -> None:
    model = saved(tmp_path / "run", ModelConfig("own", ARCHITECTURE))
    out = main(ExportSettings(run=str(tmp_path / "run"), to="torch"))
    pixels, tokens, image, text = features(model)
    for name, given, wanted in (("image", pixels, image), ("text", tokens, text)):
        found = torch.export.load(out / f"{name}.pt2").module()(given)
        worst = float((found - wanted).abs().max())
        assert worst < 1e-5, f"{name} features differ by {worst:.2e}"


@pytest.mark.slow
def test_onnx_runtime_computes_the_same(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (clipscale[onnx])")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed (clipscale[onnx])")
    model = saved(tmp_path / "run", ModelConfig("own", ARCHITECTURE))
    out = main(ExportSettings(run=str(tmp_path / "run"), to="onnx"))
    pixels, tokens, image, text = features(model)
    for name, given, wanted in (("image", pixels, image), ("text", tokens, text)):
        session = onnxruntime.InferenceSession(str(out / f"{name}.onnx"), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {"input": given.numpy()})
        worst = float((torch.from_numpy(found) - wanted).abs().max())
        assert worst < 1e-4, f"{name} features differ by {worst:.2e}"


def test_a_graph_that_computes_something_else_is_refused() -> None:
    tower = torch.nn.Linear(3, 3)
    given = torch.ones(2, 3)
    graphs.check(tower, given, tower(given).detach() + 5e-5, "to=onnx: a.onnx")
    for wrong in (tower(given).detach() + 2e-4, torch.full((2, 3), torch.nan)):
        with pytest.raises(UserError, match=r"a\.onnx gives features that differ"):
            graphs.check(tower, given, wrong, "to=onnx: a.onnx")


def test_the_card_names_data_batch_schedule_and_scores_of_the_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved(run, ModelConfig("own", ARCHITECTURE))
    (run / "config.yaml").write_text(
        "batch: 64\nsamples: null\nepochs: null\ndata:\n  train: [/data/a.tar]\nschedule:\n  name: cosine\n"
    )
    (run / "eval").mkdir()
    for step, top1 in ((7, 0.625), (9, 0.875)):
        results = {"objects": {"top1": top1, "images": 8}}
        (run / f"eval/step_{step:08d}.json").write_text(json.dumps({"step": step, "results": results}))
    card = (main(ExportSettings(run=str(run))) / "README.md").read_text()
    for line in ("| batch | 64 |", "/data/a.tar", "| schedule.name | cosine |", "| step | 7 |", "62.5", "local-dir:"):
        assert line in card, f"{line} is not in\n{card}"
    assert "87.5" not in card, "the score of another step"
    assert "samples" not in card and "epochs" not in card, "they are not set"
