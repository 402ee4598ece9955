"""XTD and Crossmodal-3600: their published layouts, one result a language, and the mean."""

import json
from pathlib import Path

import pytest

from clipscale.common.errors import UserError
from clipscale.config.sections import EvalConfig
from clipscale.eval.run import evaluate
from clipscale.eval.sets.load import load_set
from tests.eval.sets import ALONE, NAMES, ColourModel, picture

GERMAN = ["alles red", "alles blue", "alles green", "alles yellow", "alles cyan", "alles white"]
"""Two captions are exchanged."""


def xtd(root: Path) -> Path:
    """The repository with two folders of languages, beside COCO's two folders of pictures."""
    names = []
    for i, name in enumerate(NAMES):
        folder = "train2014" if i < 4 else "val2014"
        (root.parent / folder).mkdir(parents=True, exist_ok=True)
        names.append(f"COCO_{folder}_{i:012}.png")
        (root.parent / folder / names[-1]).write_bytes(picture(name))
    captions = {"XTD10": {"es": [f"todo\u2028{name}" for name in NAMES]}, "MIC": {"de": GERMAN}}
    for folder, languages in captions.items():
        (root / folder).mkdir(parents=True)
        for language, lines in languages.items():
            (root / folder / f"test_1kcaptions_{language}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (root / "XTD10" / "test_image_names.txt").write_text("\n".join(names) + "\n")
    return root


def crossmodal(root: Path) -> Path:
    """captions.jsonl and images/; one language lacks an image, and second captions are wrong."""
    (root / "images").mkdir(parents=True)
    lines = []
    for i, name in enumerate(NAMES):
        (root / "images" / f"{i:04x}.jpg").write_bytes(picture(name))
        entry = {"image/key": f"{i:04x}", "image/locale": "de", "de": {"caption": [f"alles {name}", "red"]}}
        lines.append(json.dumps(entry | ({"quz": {"caption": [f"tukuy {name}"]}} if i != 2 else {})))
    (root / "captions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return root


def test_every_language_of_xtd_has_its_result_and_the_set_their_mean(tmp_path: Path) -> None:
    root = xtd(tmp_path / "xtd10")
    model = ColourModel()
    results = evaluate(model, EvalConfig(sets=[str(root)], batch=6), ALONE, run_dir=tmp_path / "run", step=1)
    assert list(results) == ["xtd10", "xtd10/de", "xtd10/es"]
    assert results["xtd10/es"]["text_to_image_r1"] == 1 and results["xtd10/de"]["text_to_image_r1"] == 4 / 6
    assert results["xtd10"]["image_to_text_r1"] == pytest.approx((1 + 4 / 6) / 2)
    assert (results["xtd10"]["images"], results["xtd10"]["captions"]) == (6, 12)
    assert model.passes == 3, "the images are encoded once, all captions in two batches"
    measured = json.loads((tmp_path / "run/eval/step_00000001.json").read_text())["measured"]
    assert set(measured) == set(results)
    assert set(evaluate(model, EvalConfig(sets=[str(root)], limit=3), ALONE)) == {
        "xtd10 (limit 3)", "xtd10/de (limit 3)", "xtd10/es (limit 3)"
    }  # fmt: skip


def test_a_language_of_crossmodal_3600_counts_the_images_that_it_describes(tmp_path: Path) -> None:
    results = evaluate(ColourModel(), EvalConfig(sets=[str(crossmodal(tmp_path / "xm3600"))]), ALONE)
    assert list(results) == ["xm3600", "xm3600/de", "xm3600/quz"]
    assert results["xm3600/de"]["images"] == 6 and results["xm3600/quz"]["images"] == 5
    assert results["xm3600"]["text_to_image_r1"] == 1, "the first caption counts, as in CLIP_benchmark"


def test_sets_that_cannot_be_used(tmp_path: Path) -> None:
    root = xtd(tmp_path / "xtd10")
    (root / "MIC" / "test_1kcaptions_de.txt").write_text("alles red\n")
    message = r"test_1kcaptions_de\.txt has 1 captions for 6 images; fetch it again; \w+ comes from https://\S+"
    with pytest.raises(UserError, match=message):
        load_set(root)
    other = crossmodal(tmp_path / "xm3600")
    (other / "captions.jsonl").write_text('{"image/key": "0000", "de": {}}')
    with pytest.raises(UserError, match=r"is not Crossmodal-3600's .*; crossmodal3600 comes from https"):
        load_set(other)
