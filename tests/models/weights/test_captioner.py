"""A captioner's weights go to open_clip and back bit by bit, and CLIP's begin one."""

import logging
from dataclasses import replace
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.coca_model import CoCa
from safetensors.torch import save_file
from torch import Tensor

from clipscale.cli.compose import compose_settings
from clipscale.cli.words import overrides_of
from clipscale.common.errors import UserError
from clipscale.config.model import ModelConfig
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights.load_weights import completed_by_weights
from clipscale.tools.export.open_clip import weights
from clipscale.tools.export.settings import ExportSettings
from clipscale.tools.export.verb import main
from clipscale.tools.trained_model import load_model
from tests.support.checkpoints import save_model
from tests.support.towers import PIXELS, TOKENS, architecture, captioned, captioner_architecture

# Of the tokenizer's vocabulary: an export writes its own beside the weights.
WORDS = 49408
DESCRIPTION = captioner_architecture(PIXELS, 3, TOKENS, WORDS)


def built(seed: int = 0, **given: object) -> ClipModel:
    torch.manual_seed(seed)
    return build_model(completed_by_weights(ModelConfig("own", DESCRIPTION, **given)))


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def saved_run(folder: Path) -> tuple[Path, ClipModel]:
    model = built(1)
    save_model(folder, model, completed_by_weights(ModelConfig("own", DESCRIPTION)), 3)
    return folder, model


def test_weights_go_to_open_clip_and_back_bit_by_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, model = saved_run(tmp_path / "run")
    folder = main(ExportSettings(run=str(run)))
    theirs, _ = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    assert "model.text.correct_cls_mask = True" in capsys.readouterr().out
    assert isinstance(theirs, CoCa)
    assert_equal(theirs.state_dict(), weights(model))
    theirs.text.correct_cls_mask = True
    pixels, tokens = captioned(3)
    expected = theirs.encode_image(model.image.encoder_inputs(pixels)), theirs.encode_text(tokens)
    for value in (str(folder), f"run:{run}"):
        again = build_model(completed_by_weights(ModelConfig("", weights=value)))
        assert_equal(again.state_dict(), model.state_dict())
        torch.testing.assert_close((again.image(pixels), again.text(tokens)), expected, rtol=1e-4, atol=1e-5)
    assert load_model(run)[0].text.encoder.correct_cls_mask
    with pytest.raises(UserError, match="format=hf: transformers has no such model"):
        main(ExportSettings(run=str(run), format="hf"))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_weights_of_open_clips_own_keep_its_mask(tmp_path: Path, kind: str) -> None:
    run, model = saved_run(tmp_path / "run")
    folder = main(ExportSettings(run=str(run)))
    config = folder / "open_clip_config.json"
    if kind == "folder":
        config.write_text(config.read_text().replace("correct_cls_mask", "another"))
    source = folder if kind == "folder" else folder / "open_clip_model.safetensors"
    loaded = built(2, weights=str(source))
    assert_equal(loaded.state_dict(), model.state_dict())
    assert not loaded.text.encoder.correct_cls_mask
    assert built(2, weights=str(source), correct_cls_mask=True).text.encoder.correct_cls_mask


def test_weights_by_a_tag_are_those_of_its_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """open_clip finds them where its hub keeps what it has fetched; there, they are of a smaller model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--laion--CoCa-ViT-B-32-laion2B-s13B-b90k"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(snapshot.name)
    model = built(1)
    save_file(weights(model), snapshot / "open_clip_model.safetensors")
    tagged = ModelConfig("coca_ViT-B-32", DESCRIPTION, weights="laion2b_s13b_b90k")
    config = completed_by_weights(tagged)
    loaded = build_model(config)
    assert_equal(loaded.state_dict(), model.state_dict())
    assert not loaded.text.encoder.correct_cls_mask, "as they were trained"
    assert config.preprocess["interpolation"] == "bicubic"
    others = {
        "cannot be fetched": replace(tagged, name="coca_ViT-L-14"),
        "tag of model.name=coca_ViT-B-32": replace(tagged, weights="laion2b_s34b_b79k"),
    }
    for message, other in others.items():
        with pytest.raises(UserError, match=message):
            completed_by_weights(other)


def test_clips_weights_begin_a_captioner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What has no place in CLIP is new, by the seed; the text tower has one position for the class token."""
    torch.manual_seed(3)
    description = architecture(PIXELS, 3, TOKENS + 1, WORDS) | {"embed_dim": 32}
    clip = build_model(ModelConfig("clip", description))
    save_file(weights(clip), tmp_path / "clip.safetensors")
    with caplog.at_level(logging.WARNING):
        model = built(4, weights=str(tmp_path / "clip.safetensors"))
    assert (
        "CLIP's towers; new: visual.ln_post, visual.proj, visual.attn_pool, text.cls_emb, text_decoder" in caplog.text
    )
    ours = weights(model)
    theirs = weights(clip)
    random = weights(built(4))
    kept = {name for name in theirs if not name.startswith(("visual.ln_post", "visual.proj"))}
    assert all(torch.equal(ours[name], theirs[name]) for name in kept)
    assert all(torch.equal(ours[name], random[name]) for name in ours.keys() - kept)
    assert {name.partition(".")[0] for name in ours.keys() - kept} == {"visual", "text", "text_decoder"}
    assert model.text.encoder.correct_cls_mask
    save_file({"visual.conv1.weight": theirs["visual.conv1.weight"]}, tmp_path / "part.safetensors")
    with pytest.raises(UserError, match="does not fit"):
        built(weights=str(tmp_path / "part.safetensors"))


def test_the_class_token_keeps_its_position_in_another_context(tmp_path: Path) -> None:
    """The captions' positions alone are interpolated."""
    trained = built(1)
    save_file(weights(trained), tmp_path / "captioner.safetensors")
    old = trained.text.encoder.positional_embedding
    for length in (TOKENS - 7, TOKENS + 9):
        model = built(weights=str(tmp_path / "captioner.safetensors"), context_length=length)
        new = model.text.encoder.positional_embedding
        assert torch.equal(new[-1], old[-1]) and len(new) == length + 1
        expected = torch.nn.functional.interpolate(old[:-1].T[None], size=length, mode="linear")[0].T
        assert torch.equal(new[:-1], expected)


def test_an_experiments_captioner_begins_from_a_runs_two_towers(tmp_path: Path) -> None:
    """The weights' own architecture replaces that of an experiment, but would have no decoder."""
    config = compose_settings("train", overrides_of("train", ["model=tiny"])[1]).model
    save_model(tmp_path / "run", build_model(config), config, 3)
    given = ["experiment=demo-coca", f"model.weights={tmp_path}/run"]
    assert compose_settings("train", overrides_of("train", given)[1]).model.name == "coca_tiny"
    assert compose_settings("train", overrides_of("train", ["experiment=demo", given[1]])[1]).model.name == "tiny"
    other = ["experiment=demo-coca", "model=coca-b32", given[1]]
    with pytest.raises(UserError, match=r"run' is tiny, .*give a captioner of its sizes with model="):
        compose_settings("train", overrides_of("train", other)[1])
