"""open_clip loads the exported weights and computes the features of the run's model."""

import json
import resource
from itertools import product
from pathlib import Path

import open_clip
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from clipscale.common.errors import UserError
from clipscale.config.model import ModelConfig
from clipscale.data.eval_transform import EvalTransform
from clipscale.models.towers import ClipModel, build_model
from clipscale.models.weights.load_weights import completed_by_weights
from clipscale.tools.export.hugging_face import write_tokenizer
from clipscale.tools.export.open_clip import check_rebuilt_by_open_clip
from clipscale.tools.export.settings import ExportSettings
from clipscale.tools.export.verb import main
from tests.conftest import Capture
from tests.support.cases import slow_except
from tests.support.checkpoints import save_model
from tests.support.towers import RESNET, architecture

ARCHITECTURE = architecture(32, 8, 12)


def saved(run: Path, config: ModelConfig) -> ClipModel:
    """A run whose only checkpoint holds a random model."""
    torch.manual_seed(0)
    model = build_model(config)
    save_model(run, model, config)
    return model.eval()


@pytest.mark.parametrize(
    ("image", "bias"), slow_except([("vit", -10.0), ("resnet", None)], product(("vit", "resnet"), (None, -10.0)))
)
def test_open_clip_loads_what_was_exported_and_computes_the_same(
    tmp_path: Path, image: str, bias: float | None
) -> None:
    mean = (0.5, 0.4, 0.3)
    own = ARCHITECTURE | ({"vision_cfg": RESNET} if image == "resnet" else {})
    model = saved(tmp_path / "run", ModelConfig("own", own, init_bias=bias, init_scale=20.0, preprocess={"mean": mean}))
    out = main(ExportSettings(run=str(tmp_path / "run"), out=str(tmp_path / "out")))

    loaded, transform = open_clip.create_model_from_pretrained(f"local-dir:{out}")
    loaded.eval()
    picture = Image.effect_noise((50, 40), 60).convert("RGB")
    picture.save(tmp_path / "a.png")
    pixels = EvalTransform(32)((tmp_path / "a.png").read_bytes())
    tokens = open_clip.get_tokenizer(f"local-dir:{out}")(["a red ring", "two cats"])
    assert torch.equal(tokens, model.tokenizer(["a red ring", "two cats"]))
    with torch.no_grad():
        images = loaded.encode_image(transform(picture)[None], normalize=True)
        torch.testing.assert_close(model.image(torch.from_numpy(pixels)[None]), images, atol=1e-5, rtol=0)
        torch.testing.assert_close(model.text(tokens), loaded.encode_text(tokens, normalize=True), atol=1e-6, rtol=0)
    assert torch.equal(loaded.logit_scale, model.logit_scale)
    assert loaded.logit_bias == bias


def test_the_export_of_another_run_is_not_replaced(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for name in ("first", "second"):
        saved(tmp_path / name, ModelConfig("own", ARCHITECTURE))
    main(ExportSettings(run=str(tmp_path / "first"), out=out))
    with pytest.raises(UserError, match="an export of another run; choose another out=FOLDER"):
        main(ExportSettings(run=str(tmp_path / "second"), out=out))
    assert "# first, step " in (tmp_path / "out/README.md").read_text()
    main(ExportSettings(run=str(tmp_path / "first"), out=out))  # the same run may


def test_a_card_that_was_edited_stays_and_an_own_one_follows_the_run(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    card = tmp_path / "run/export/README.md"
    saved(run, ModelConfig("own", ARCHITECTURE))
    main(ExportSettings(run=str(run)))
    (run / "config.yaml").write_text("batch: 4321\n")
    main(ExportSettings(run=str(run)))
    written = card.read_text()
    assert "| batch | 4321 |" in written
    for edited in ("# Ours\n\nFor flowers.\n", written.replace("## Training", "## How"), written + "More.\n", ""):
        card.write_text(edited)
        capsys.readouterr()
        main(ExportSettings(run=str(run)))
        assert card.read_text() == edited
        assert "README.md: has been edited, and is kept" in capsys.readouterr().out
    card.unlink()
    main(ExportSettings(run=str(run)))
    assert card.read_text() == written


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    saved(tmp_path / "run", ModelConfig("own", ARCHITECTURE))
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"^out=.*/file/e: cannot be written \(Not a directory\); .* another out=FOLDER$"
    ):
        main(ExportSettings(run=str(tmp_path / "run"), out=str(tmp_path / "file/e")))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # which weights find as they find a full disk
    try:
        with pytest.raises(UserError, match=r"^out=.*/run/export: cannot be written \(.*; make room"):
            main(ExportSettings(run=str(tmp_path / "run")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not any((tmp_path / "run/export").iterdir())


def test_an_export_that_was_killed_before_its_card_can_be_repeated(tmp_path: Path) -> None:
    saved(tmp_path / "run", ModelConfig("own", ARCHITECTURE))
    out = main(ExportSettings(run=str(tmp_path / "run")))
    for name in ("README.md", "open_clip_config.json"):
        (out / name).unlink()
    assert {path.name for path in main(ExportSettings(run=str(tmp_path / "run"))).iterdir()} >= {"README.md"}


def test_the_file_names_the_step_and_the_description_has_nothing_of_the_training(tmp_path: Path) -> None:
    saved(tmp_path / "run", ModelConfig("own", ARCHITECTURE, patch_dropout=0.5))
    out = main(ExportSettings(run=str(tmp_path / "run")))
    assert out == tmp_path / "run/export"
    with safe_open(out / "open_clip_model.safetensors", "pt") as file:
        assert file.metadata()["step"] == "7"
    description = json.loads((out / "open_clip_config.json").read_text())["model_cfg"]
    assert "patch_dropout" not in description["vision_cfg"]


def test_a_tokenizer_of_its_own_is_found_in_the_exported_folder(tmp_path: Path) -> None:
    """The description has no path, and both programs read the folder from wherever it is."""
    pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")
    (tmp_path / "words").mkdir()
    write_tokenizer(tmp_path / "words", 12)
    text = ARCHITECTURE["text_cfg"] | {"hf_tokenizer_name": str(tmp_path / "words")}
    model = saved(tmp_path / "run", ModelConfig("own", ARCHITECTURE | {"text_cfg": text}))
    out = main(ExportSettings(run=str(tmp_path / "run"))).rename(tmp_path / "moved")
    expected = model.tokenizer(["a red ring"])
    (tmp_path / "words").rename(tmp_path / "gone")
    assert str(tmp_path) not in (out / "open_clip_config.json").read_text()
    again = build_model(completed_by_weights(ModelConfig("", weights=str(out))))
    assert torch.equal(again.tokenizer(["a red ring"]), expected)
    assert torch.equal(open_clip.get_tokenizer(f"local-dir:{out}")(["a red ring"]), expected)


SIGLIP = "vit_base_patch16_siglip_224"
VISION = {"image_size": 224, "timm_model_name": SIGLIP, "timm_pool": "map", "timm_proj": "linear"}


def test_a_tower_of_timm_that_open_clip_builds_otherwise_is_refused() -> None:
    own, larger = (ModelConfig("own", ARCHITECTURE | {"vision_cfg": VISION}, image_size=side) for side in (224, 240))
    with torch.device("meta"):
        check_rebuilt_by_open_clip(build_model(own), own)
        with pytest.raises(UserError, match=rf"{SIGLIP} at its own size, not at model\.image_size=240"):
            check_rebuilt_by_open_clip(build_model(larger), larger)


def test_the_card_names_settings_and_scores_of_the_step_and_no_path(tmp_path: Path) -> None:
    run = tmp_path / "caf\udce9"
    saved(run, ModelConfig("own", ARCHITECTURE))
    (run / "config.yaml").write_text(
        "batch: 64\nsamples: null\ndata:\n  train: [/data/a.tar]\nschedule:\n  name: cosine\n"
    )
    (run / "eval").mkdir()
    for step, top1 in ((7, 0.625), (9, 0.875)):
        results = {"objects": {"top1": top1, "images": 8}}
        (run / f"eval/step_{step:08d}.json").write_text(json.dumps({"step": step, "results": results}))
    card = (main(ExportSettings(run=str(run))) / "README.md").read_text()
    for line in ("| batch | 64 |", "| schedule.name | cosine |", "| objects | 8 | 62.5 |", "local-dir:export"):
        assert line in card, f"{line} is not in\n{card}"
    assert "87.5" not in card, "the score of another step"
    assert "samples" not in card, "it is not set"
    assert str(tmp_path) not in card and "/data" not in card, "a path of this machine"
