"""Models of transformers have the same features here, and an export gives the same folders back."""

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from clipscale.common import files
from clipscale.common.errors import UserError
from clipscale.config.model import ModelConfig, Preprocess, TowerConfig
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights.descriptions import OPEN_CLIP_CONFIG, described_model
from clipscale.models.weights.hugging_face import TANH
from clipscale.models.weights.load_weights import completed_by_weights
from clipscale.models.weights.sources import local_source
from clipscale.tools.export.hugging_face import write_tokenizer
from clipscale.tools.export.settings import ExportSettings
from clipscale.tools.export.verb import main, name_of_start
from tests.support.checkpoints import save_model
from tests.tools.export.test_open_clip import ARCHITECTURE, saved

TABLES = files.read_yaml(Path(__file__).with_name("hugging_face.yaml"))

transformers = pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")
TEXTS = ["a red ring", "two cats on a chair, and a dog"]
SIDE = 32
TOKENS = 12


@pytest.fixture(autouse=True)
def shallow_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """open_clip builds a SigLIP's trunk as its name says, and a small one takes its place: the first has one block."""
    monkeypatch.setattr("open_clip.timm_model.timm.create_model", partial(timm.create_model, depth=1))


def reference(kind: str, act: str, eos: int = 49407) -> Any:
    """A small model of transformers with random weights."""
    torch.manual_seed(3)
    # 115 / 28 has no exact quotient, like a published 4304 / 1152: the MLP has 115 units all the same.
    sizes = {"hidden_size": 28, "intermediate_size": 115, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = sizes | {"max_position_embeddings": TOKENS, "vocab_size": 49408, "hidden_act": act, "eos_token_id": eos}
    towers = {
        "text_config": text,
        "vision_config": sizes | {"image_size": SIDE, "patch_size": 8, "hidden_act": act},
    }
    if kind == "clip":
        model = transformers.CLIPModel(transformers.CLIPConfig(projection_dim=24, **towers))
    else:
        model = transformers.SiglipModel(transformers.SiglipConfig(**towers))
    for parameter in model.parameters():
        if parameter.ndim < 2:  # biases and gains begin as zeros and ones
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def tokens(end: int = 49407) -> Tensor:
    rows = torch.randint(300, 40000, (3, TOKENS), generator=torch.Generator().manual_seed(0))
    rows[torch.arange(3), torch.tensor([4, 7, 11])] = end
    return rows


def assert_same(ours: ClipModel, theirs: Any, texts: Tensor) -> None:
    def unit(output: Any) -> Tensor:
        return F.normalize(getattr(output, "pooler_output", output), dim=-1)

    pixels = torch.randint(0, 256, (2, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    normalised = (pixels - ours.image.mean) / ours.image.std
    ours.eval()
    with torch.no_grad():
        for features, expected in (
            (ours.image(pixels), unit(theirs.get_image_features(pixel_values=normalised))),
            (ours.text(texts), unit(theirs.get_text_features(input_ids=texts))),
        ):
            error = (features - expected).abs().max()
            assert error < 1e-6, f"{error}"
    assert torch.equal(ours.logit_scale.reshape(()), theirs.logit_scale.reshape(()))


def model_of(folder: Path) -> tuple[ClipModel, ModelConfig]:
    config = completed_by_weights(ModelConfig(name="", weights=str(folder)))
    return build_model(config), config


@pytest.mark.parametrize(
    ("kind", "act", "eos", "form"),
    [pytest.param(*case, marks=pytest.mark.slow if case[1] == "gelu" else []) for case in TABLES["folders"]],
)
def test_a_folder_has_the_features_of_transformers_and_is_exported_as_it_came(
    tmp_path: Path, kind: str, act: str, eos: int, form: str
) -> None:
    theirs = reference(kind, act, eos)
    folder = tmp_path / "theirs"
    theirs.save_pretrained(folder, max_shard_size="100KB" if form == "sharded" else "1GB")
    if form == "bin":
        (folder / "model.safetensors").unlink()
        items = list(theirs.state_dict().items())
        for i in (0, 1):
            torch.save(dict(items[i::2]), folder / f"{i}.bin")
        index = {"weight_map": {name: f"{i % 2}.bin" for i, (name, _) in enumerate(items)}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    ours, config = model_of(folder)
    end = eos if eos != 2 else 49407
    assert_same(ours, theirs, tokens(end))
    assert config.pixels.resize_mode == ("shortest" if kind == "clip" else "squash")
    save_model(tmp_path / "run", ours, config)
    out = main(ExportSettings(run=str(tmp_path / "run"), format="hf"))
    assert (out / "vocab.json").is_file() == (kind == "clip"), "CLIPTokenizer pads with another token than ours"
    again = transformers.AutoModel.from_pretrained(out).eval()
    for name, value in again.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name
    assert_same(ours, again, tokens(end))
    if kind == "clip":  # with a projection, whose width they read from their own part of config.json
        image = transformers.CLIPVisionModelWithProjection.from_pretrained(out)
        text = transformers.CLIPTextModelWithProjection.from_pretrained(out)
        assert torch.equal(image.visual_projection.weight, theirs.visual_projection.weight)
        assert torch.equal(text.text_projection.weight, theirs.text_projection.weight)


def test_one_tower_of_a_folder_and_a_tower_alone(tmp_path: Path) -> None:
    theirs = reference("clip", "gelu")
    theirs.save_pretrained(tmp_path / "whole")
    transformers.CLIPVisionModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "tower")
    _, config = model_of(tmp_path / "whole")
    expected = build_model(config).image.encoder.state_dict()
    for folder in ("whole", "tower"):
        start = ModelConfig("own", config.architecture, image=TowerConfig(str(tmp_path / folder)))
        state = build_model(start).image.encoder.state_dict()
        assert all(torch.equal(state[name], expected[name]) for name in expected if name != "proj"), folder


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "spiece.model"])
def test_a_folder_with_a_vocabulary_has_the_tokenizer_that_its_description_names(tmp_path: Path, name: str) -> None:
    text = {"hf_tokenizer_name": "bert-base-uncased"}
    (tmp_path / OPEN_CLIP_CONFIG).write_text(json.dumps({"model_cfg": ARCHITECTURE | {"text_cfg": text}}))
    (tmp_path / name).touch()
    found = described_model(tmp_path, "own").architecture["text_cfg"]["hf_tokenizer_name"]
    assert found == str(tmp_path.resolve()), "and not a server's"


def test_pictures_and_texts_are_prepared_as_the_folder_says(tmp_path: Path) -> None:
    theirs = reference("clip", "gelu")
    theirs.save_pretrained(tmp_path)
    pixels = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 2, "size": {"height": 32, "width": 32}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": pixels}))
    _, config = model_of(tmp_path)
    assert config.pixels == Preprocess((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), "squash", "bilinear")
    write_tokenizer(tmp_path, TOKENS)
    assert "hf_tokenizer_name" not in model_of(tmp_path)[1].architecture["text_cfg"], "CLIP's own needs no file"
    words = json.loads((tmp_path / "vocab.json").read_text())
    words["red</w>"], words["ring</w>"] = words["ring</w>"], words["red</w>"]
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    ours, _ = model_of(tmp_path)
    expected = transformers.CLIPTokenizer.from_pretrained(tmp_path)(TEXTS, padding="max_length", max_length=TOKENS)
    assert ours.tokenizer(TEXTS).tolist() == expected["input_ids"], "one of the folder's own"
    assert ours.tokenizer(TEXTS).tolist() != open_clip.SimpleTokenizer(context_length=TOKENS)(TEXTS).tolist()
    bare = tmp_path / "bare"
    theirs.save_pretrained(bare)
    (bare / "config.json").write_text((bare / "config.json").read_text().replace("49408", "9000"))
    lacking = completed_by_weights(ModelConfig(name="", weights=str(bare)))
    with pytest.raises(UserError, match=r"bare has none of tokenizer\.json.*; download them"):  # asks no server
        build_model(ModelConfig("own", lacking.architecture)).tokenizer(TEXTS)


def test_an_export_prepares_pictures_and_texts_as_the_run(tmp_path: Path) -> None:
    model = saved(tmp_path / "run", ModelConfig("own", ARCHITECTURE, preprocess={"mean": [0.5, 0.4, 0.3]}))
    out = main(ExportSettings(run=str(tmp_path / "run"), format="hf", out=str(tmp_path / "hf")))
    processor = transformers.CLIPProcessor.from_pretrained(out, use_fast=False)
    picture = Image.effect_noise((50, 40), 60).convert("RGB")
    picture.save(tmp_path / "a.png")
    ours = torch.from_numpy(model.eval_transform()((tmp_path / "a.png").read_bytes()))
    inputs = processor(text=TEXTS, images=picture, return_tensors="pt", padding=True)
    expected = (ours - model.image.mean) / model.image.std
    assert torch.allclose(inputs["pixel_values"][0], expected, atol=1.1 / 255 / 0.26)
    for row, expected_row in zip(inputs["input_ids"].tolist(), model.tokenizer(TEXTS).tolist()):
        end = row.index(49407) + 1
        assert row[:end] == expected_row[:end]
    assert model_of(out)[1].pixels == model.pixels


@pytest.mark.parametrize(("changes", "towers", "message"), TABLES["refused"])
def test_a_model_that_transformers_does_not_have_is_refused(
    tmp_path: Path, changes: dict, towers: dict, message: str
) -> None:
    saved(tmp_path / "run", ModelConfig("own", ARCHITECTURE | towers, **changes))
    with pytest.raises(UserError, match=rf"format=hf.*(?i:{message}).*format=open_clip"):
        main(ExportSettings(run=str(tmp_path / "run"), format="hf"))
    assert not (tmp_path / "run/export-hf").exists()


@pytest.mark.slow  # the test above refuses a text tower of other features by the same comparison
def test_a_siglip_that_pools_the_end_token_is_refused(tmp_path: Path) -> None:
    """SigLIP of transformers pools the last token, which is a pad after every caption but the longest."""
    reference("siglip", TANH).save_pretrained(tmp_path / "theirs")
    _, config = model_of(tmp_path / "theirs")
    text = config.architecture["text_cfg"] | {"pool_type": "argmax"}
    saved(tmp_path / "run", replace(config, weights=None, architecture=config.architecture | {"text_cfg": text}))
    with pytest.raises(UserError, match=r"format=hf: .*its text tower would have other features"):
        main(ExportSettings(run=str(tmp_path / "run"), format="hf"))


def test_exports_are_as_readable_as_other_files_and_replace_none_of_others(tmp_path: Path) -> None:
    saved(tmp_path / "run", ModelConfig("own", ARCHITECTURE))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "model.safetensors").write_text("precious")
    mask = os.umask(0o027)
    try:
        for form in ("hf", "open_clip"):
            settings = ExportSettings(run=str(tmp_path / "run"), format=form)
            assert {path.stat().st_mode & 0o777 for path in main(settings).iterdir()} == {0o640}
            main(settings)  # over its own
            with pytest.raises(UserError, match="files of other origin"):
                main(replace(settings, out=str(theirs)))
        mixed = replace(settings, out=str(tmp_path / "run/export-hf"))
        with pytest.raises(UserError, match="export-hf: the folder has an export of the other format; choose another"):
            main(mixed)
    finally:
        os.umask(mask)
    assert (theirs / "model.safetensors").read_text() == "precious"


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    reference("clip", "gelu").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("part", "values", "message"),
    TABLES["descriptions"],
)
def test_a_configuration_that_is_not_of_these_weights_is_refused(
    clip_folder: Path, tmp_path: Path, part: str, values: Any, message: str
) -> None:
    shutil.copytree(clip_folder, tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "config.json").read_text())
    content[part] |= values
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        model_of(tmp_path)


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/passwd", "none.safetensors", "x.py", 5])
def test_an_index_names_files_of_its_folder(tmp_path: Path, name: Any) -> None:
    (tmp_path / "out.safetensors").write_text("outside")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="folder cannot be used"):
        local_source(str(folder))


@pytest.mark.parametrize(("weights", "name"), TABLES["cards"].items())
def test_the_card_names_the_weights_that_a_run_began_from_and_no_path(weights: str, name: str) -> None:
    assert name_of_start(weights) == name
